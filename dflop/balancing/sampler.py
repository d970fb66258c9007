"""A batch sampler for other people's training loops: the samples of every step unchanged, dealt evenly to the ranks.

It takes what each sample costs and stands where torch's DistributedSampler and BatchSampler stood. Which samples make
up a step is theirs, bit for bit; who computes which of them is decided by `replicas`. It needs torch and numba, and
none of the rest of dflop.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler

from dflop.balancing.replicas import balanced_cells
from dflop.runtime import UserError

__all__ = ["BalancedBatchSampler"]


class BalancedBatchSampler(BatchSampler):
    """Yields this rank's batches of dataset indices: `DataLoader(dataset, batch_sampler=BalancedBatchSampler(...))`.

    A step is `num_accumulation_steps` batches on each of `num_replicas` ranks. It holds exactly the samples that
    `BatchSampler(DistributedSampler(dataset, num_replicas, rank, shuffle, seed, drop_last), batch_size, drop_last)`
    would give all ranks together, in the same epoch and at the same place in it; `len` is the same, too. With
    `drop_last=False` the first samples of the shuffle are repeated until every rank has as many, as torch does it, and
    the last batch is smaller, on all ranks alike. Steps are counted from the start of an epoch; its last one may have
    fewer batches. Within a step, ranks never wait longer for each other than with torch's assignment, by the costs
    given, whether they meet after every batch (FSDP) or after the last (DDP without sync).

    Every rank works out the same assignment, without a word between them, from costs, seed and epoch: these must be
    the same everywhere. A step is worked out when its first batch is asked for (about a millisecond for 128 samples);
    an epoch begins with one permutation of the dataset.

    The loss: ranks hold like numbers of samples and like costs, not like numbers of target tokens. A mean over ranks
    of means over tokens therefore weighs tokens unevenly, as it does with any sampler. Sum the loss over tokens and
    divide by the tokens of the whole step: `average_tokens_across_devices=True` (the default) does so in the Hugging
    Face Trainer for models and loss functions that take `num_items_in_batch`.

    Accelerate: leave the loader out of `accelerator.prepare`, which would shard the batches a second time and drop
    most of them.

    Args:
        costs: `[num_samples]`, or `[num_samples, num_modules]` to balance several modules at once, such as the crops
            that the encoder sees and the tokens that the LLM sees; in dataset order. Lists, arrays (memory-mapped ones
            stay on disk) and tensors of lengths, seconds or FLOPs: only ratios within a column matter. For long
            sequences, where attention counts, give `n + n * n / c` rather than lengths n. That there is one for
            each sample of the dataset cannot be checked here.
        batch_size: samples in a rank's batch.
        num_replicas: data-parallel ranks, without tensor or pipeline parallelism; of the process group by default.
        rank: the data-parallel rank; of the process group by default.
        num_accumulation_steps: batches that a rank computes between two optimiser steps. The more samples a step has,
            the evener it can be.
        padded: the collator pads a batch to its longest sample, so that a batch costs `batch_size` times its largest
            cost; by default costs add up, as in packed sequences and in encoders that run image by image.

    Raises:
        UserError: for what cannot be, naming it and the way out.
    """

    def __init__(
        self,
        costs: Any,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        num_accumulation_steps: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        padded: bool = False,
    ) -> None:
        self._costs = _checked_costs(costs)
        num_samples = len(self._costs)
        self.batch_size = _at_least(1, "batch_size", batch_size)
        self.num_replicas, self.rank = _place_in_group(num_replicas, rank)
        self.num_accumulation_steps = _at_least(1, "num_accumulation_steps", num_accumulation_steps)
        self.shuffle, self.seed, self.drop_last = bool(shuffle), _integer("seed", seed), bool(drop_last)
        self.padded = bool(padded)
        if self.padded and self._costs.shape[1] > 1:
            raise UserError(
                f"padded=True needs one cost a sample, its length, not {self._costs.shape[1]}; give the lengths that "
                "are padded, or leave padded out"
            )
        self.epoch = 0
        each = num_samples // self.num_replicas if self.drop_last else -(-num_samples // self.num_replicas)
        if each < self.batch_size and self.drop_last:
            raise UserError(
                f"{num_samples} samples do not fill one batch of {self.batch_size} on each of {self.num_replicas} "
                f"ranks, and drop_last=True leaves out what is not full; use "
                f"{f'batch_size <= {each}' if each else f'num_replicas <= {num_samples}'}, or drop_last=False"
            )
        super().__init__(range(num_samples), self.batch_size, self.drop_last)
        self._num_batches = each // self.batch_size if self.drop_last else -(-each // self.batch_size)
        self._num_samples_used = self.num_replicas * min(each, self._num_batches * self.batch_size)
        self._start = self._num_yielded = 0

    def __len__(self) -> int:
        """Batches of this rank in an epoch, as many as any other rank has."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        self._num_yielded = start
        return self._batches_from(start, self._order())

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as torch's DistributedSampler does in this epoch; one that is not the current begins anew."""
        epoch = _at_least(0, "epoch", epoch)
        if epoch != self.epoch:
            self.epoch, self._start, self._num_yielded = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is, the same on every rank; made of numbers alone.

        It counts what was handed out, which is ahead of what was trained on where a loader prefetches: torchdata's
        StatefulDataLoader keeps the two apart and calls this at the right moments.
        """
        whole, part = divmod(self._num_yielded, self.num_accumulation_steps)
        if self._num_yielded == self._num_batches:
            whole, part = -(-self._num_batches // self.num_accumulation_steps), 0
        return {
            "epoch": self.epoch,
            "num_steps": whole,
            "num_batches_of_step": part,
            **self._stream(),
            **self._division(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, at the next `iter`, where the state was taken.

        On other numbers of ranks and accumulation steps, too, as long as their product with `batch_size` is the same
        and the state was taken between two steps.

        Raises:
            UserError: the state is of another stream of samples, or of none.
        """
        position = {"epoch", "num_steps", "num_batches_of_step"}
        missing = sorted((position | self._stream().keys() | self._division().keys()) - set(state or ()))
        if missing:
            raise UserError(f"not a state of BalancedBatchSampler: it lacks {', '.join(missing)}")
        for name, own in self._stream().items():
            if state[name] != own:
                raise UserError(
                    f"the state is of {name}={state[name]}, but this sampler has {name}={own}, so that its steps hold "
                    "other samples; make the sampler as it was when the state was taken, or start without the state"
                )
        epoch, whole, part = (_at_least(0, name, state[name]) for name in ("epoch", "num_steps", "num_batches_of_step"))
        other = [f"{name}={state[name]} (now {own})" for name, own in self._division().items() if state[name] != own]
        if part and other:
            raise UserError(
                f"the state was taken after {part} of {state['num_accumulation_steps']} batches of a step, dealt with "
                f"{', '.join(other)}; resume with the old values, or from a state taken between two steps"
            )
        num_steps = -(-self._num_batches // self.num_accumulation_steps)
        if whole >= num_steps and epoch < self.epoch:
            return  # A finished epoch, loaded by a loader that puts off loading until the next epoch was set.
        self.epoch = epoch
        self._start = min(whole * self.num_accumulation_steps + part, self._num_batches)
        self._num_yielded = self._start

    def _stream(self) -> dict[str, Any]:
        """What decides which samples make up which step."""
        size = self.batch_size * self.num_replicas * self.num_accumulation_steps
        return {
            "num_samples": len(self._costs),
            "samples_per_step": size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def _division(self) -> dict[str, Any]:
        """What decides, with the costs, who computes which of them."""
        names = ("batch_size", "num_replicas", "num_accumulation_steps", "padded")
        return {name: getattr(self, name) for name in names}

    def _order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self._costs))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self._costs), generator=generator).numpy()

    def _batches_from(self, start: int, order: np.ndarray) -> Iterator[list[int]]:
        begin = -1
        for number in range(start, self._num_batches):
            step, microbatch = divmod(number, self.num_accumulation_steps)
            if begin != step:
                begin, own = step, self._own_batches(step, order)
            self._num_yielded = number + 1
            yield own[microbatch]

    def _own_batches(self, step: int, order: np.ndarray) -> list[list[int]]:
        size = self.batch_size * self.num_replicas * self.num_accumulation_steps
        positions = np.arange(step * size, min((step + 1) * size, self._num_samples_used))
        samples = order[positions % len(order)]
        cell = balanced_cells(self._costs[samples], self.num_replicas, self.batch_size, padded=self.padded)
        own = range(self.rank, int(cell.max()) + 1, self.num_replicas)
        return [samples[cell == number].tolist() for number in own]


def _checked_costs(costs: Any) -> np.ndarray:
    """`[num_samples, num_columns]` as it was given, not copied where it is an array."""
    if isinstance(costs, torch.Tensor):
        costs = costs.detach().cpu()
        costs = (costs.double() if costs.is_floating_point() else costs).numpy()
    elif isinstance(costs, Sequence):
        costs = costs[:]  # A column of a Hugging Face dataset is read at once so, and else row by row.
    try:
        costs = np.asarray(costs)
    except ValueError as error:
        raise UserError("costs must have the same number of columns for every sample") from error
    if costs.ndim not in (1, 2) or costs.size == 0 or costs.dtype.kind not in "iuf":
        raise UserError(
            "costs must be numbers, [num_samples] or [num_samples, num_modules], and at least one sample's; "
            f"these are {costs.dtype} of shape {list(costs.shape)}"
        )
    costs = costs.reshape(len(costs), -1)
    wrong = ~(np.isfinite(costs) & (costs >= 0)).all(axis=1)
    if wrong.any():
        first = int(wrong.argmax())
        value = ", ".join(str(value) for value in costs[first].tolist())
        raise UserError(
            f"sample {first} costs {value}: costs must be finite and not negative ({int(wrong.sum())} of {len(costs)} "
            "samples are not); mend them, or leave these samples out of the dataset"
        )
    return costs


def _place_in_group(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    if num_replicas is None or rank is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UserError(
                "there is no process group to ask for num_replicas and rank; call torch.distributed.init_process_group "
                "first, or give both (num_replicas=1, rank=0 for a single process)"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
    num_replicas, rank = _at_least(1, "num_replicas", num_replicas), _integer("rank", rank)
    if not 0 <= rank < num_replicas:
        raise UserError(f"rank={rank} is not among the ranks 0 to {num_replicas - 1} of num_replicas={num_replicas}")
    return num_replicas, rank


def _at_least(least: int, name: str, value: Any) -> int:
    number = _integer(name, value)
    if number < least:
        raise UserError(f"{name}={number} must be at least {least}")
    return number


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name}={value!r} must be a whole number") from None
