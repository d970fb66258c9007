"""A batch sampler for other people's training loops: the samples of every step unchanged, dealt evenly to the ranks.

It takes what each sample costs and replaces torch's DistributedSampler and BatchSampler. Every step holds the samples
that these would give it, unless samples of like cost are to share a step (`megabatch_steps`); which rank computes which
of them is decided by `replicas` and `unequal`. It needs torch and numba, and none of the rest of dflop.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler

from dflop.balance.replicas import ByteLimit, DoesNotFit, Sync, balanced_cells, cost_shares
from dflop.balance.unequal import unequal_cells
from dflop.base import UserError

__all__ = ["BalancedBatchSampler"]


class BalancedBatchSampler(BatchSampler):
    """Yields this rank's batches of dataset indices: `DataLoader(dataset, batch_sampler=BalancedBatchSampler(...))`.

    A step is `num_accumulation_steps` batches on each of `num_replicas` ranks. It holds exactly the samples that
    `BatchSampler(DistributedSampler(dataset, num_replicas, rank, shuffle, seed, drop_last), batch_size, drop_last)`
    would give all ranks together, in the same epoch and at the same place in it; `len` is the same, too. With
    `drop_last=False` the first samples of the shuffle are repeated until every rank has as many, as torch does it, and
    the last batch is smaller, on all ranks alike. Steps are counted from the start of an epoch; its last one may have
    fewer batches. By the costs given, a step never takes longer than with torch's assignment, unless `max_batch_bytes`
    demands it.

    Every rank works out the same assignment, without communication, from costs, seed and epoch: these must be the same
    everywhere. A step is worked out when its first batch is asked for (about a millisecond for 128 samples); an epoch
    begins with one permutation of the dataset.

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
            sequences, where attention counts, give `n + n * n / c` rather than lengths n. The sampler cannot check
            that there is one for each sample of the dataset.
        batch_size: samples in a rank's batch.
        num_replicas: data-parallel ranks, without tensor or pipeline parallelism; of the process group by default.
        rank: the data-parallel rank; of the process group by default.
        padded: True where the collator pads a batch to its longest sample, so that a batch costs its number of samples
            times its largest cost. False where costs add up: in packed sequences, and in encoders that run image by
            image. `dflop.pads_batches(collator, dataset)` finds out. A wrong value can be worse than no balancing.
        num_accumulation_steps: batches that a rank computes between two optimiser steps. The more samples a step has,
            the evener it can be.
        sync: how often ranks wait for each other. "microbatch": in every batch, as FSDP and DeepSpeed do and DDP
            without `no_sync`. "step": once a step, as DDP with `no_sync` does while it accumulates (the Hugging Face
            Trainer's way); a rank's batches then need to be even only in sum.
        equal_sizes: True: all batches of a step hold `batch_size` samples. False: `batch_size` is their mean, and a
            batch of short samples holds more of them than one of long samples, at least one. Ranks are evener, padded
            ones by far, and no step takes over 1 % longer than with equal sizes. The loss must then be divided by the
            tokens (or samples) of the whole step, as above.
        megabatch_steps: 1, or so many steps are drawn at once, and samples of like cost share a step, as with
            `group_by_length` of the Hugging Face Trainer; the steps then come in random order. Where batches are
            padded and a step has few of them, samples of one step alone cannot be padded little.
        sample_bytes: `[num_samples]`, what each sample adds to the memory of its batch (its size when padded), such as
            its activations; needs `max_batch_bytes`.
        max_batch_bytes: no batch holds more than this. Other units, such as tokens, will do if both have them.

    Raises:
        UserError: a value is impossible, or a sample does not fit into any batch; it says which, and the way out.
            Each epoch begins with a check that no step has a sample that fits into none of its batches.
    """

    def __init__(
        self,
        costs: Any,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        padded: bool,
        num_accumulation_steps: int = 1,
        sync: Sync = "microbatch",
        equal_sizes: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        megabatch_steps: int = 1,
        sample_bytes: Any = None,
        max_batch_bytes: int | None = None,
    ) -> None:
        self._costs = _checked_numbers("costs", costs)
        num_samples = len(self._costs)
        self.batch_size = _at_least(1, "batch_size", batch_size)
        self.num_replicas, self.rank = _place_in_group(num_replicas, rank)
        self.num_accumulation_steps = _at_least(1, "num_accumulation_steps", num_accumulation_steps)
        self.shuffle, self.seed, self.drop_last = bool(shuffle), _integer("seed", seed), bool(drop_last)
        self.padded, self.sync, self.equal_sizes = bool(padded), sync, bool(equal_sizes)
        self.megabatch_steps = _at_least(1, "megabatch_steps", megabatch_steps)
        if self.padded and self._costs.shape[1] > 1:
            raise UserError(
                f"padded=True needs one cost a sample, its length, not {self._costs.shape[1]}; give the lengths that "
                "are padded, or padded=False"
            )
        if sync not in get_args(Sync):
            raise UserError(f"sync={sync!r} must be one of {', '.join(map(repr, get_args(Sync)))}")
        self.epoch = 0
        num_per_rank = num_samples // self.num_replicas if self.drop_last else -(-num_samples // self.num_replicas)
        if num_per_rank < self.batch_size and self.drop_last:
            raise UserError(
                f"{num_samples} samples do not fill one batch of {self.batch_size} on each of {self.num_replicas} "
                f"ranks, and drop_last=True leaves out what is not full; use "
                f"{f'batch_size <= {num_per_rank}' if num_per_rank else f'num_replicas <= {num_samples}'}, "
                "or drop_last=False"
            )
        super().__init__(range(num_samples), self.batch_size, self.drop_last)
        self.sampler = self  # whose `set_epoch` Lightning calls
        self._num_batches = num_per_rank // self.batch_size if self.drop_last else -(-num_per_rank // self.batch_size)
        self._num_samples_used = self.num_replicas * min(num_per_rank, self._num_batches * self.batch_size)
        self.max_batch_bytes = max_batch_bytes
        self._limit = self._byte_limit(sample_bytes)
        self._start = self._num_yielded = 0

    def __len__(self) -> int:
        """Batches of this rank in an epoch, as many as any other rank has."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        self._num_yielded = start
        order = self._order()
        self._check_that_steps_fit(order)
        return self._batches_from(start, order)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as torch's DistributedSampler does in this epoch. Another epoch than the current one starts anew."""
        epoch = _at_least(0, "epoch", epoch)
        if epoch != self.epoch:
            self.epoch, self._start, self._num_yielded = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The sampler's position in the epoch, the same on every rank, as plain values.

        It counts the batches handed out. A loader that prefetches has been handed more batches than were trained on;
        torchdata's StatefulDataLoader keeps the two apart and calls this at the right moments.
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
        """Continue, at the next `iter`, where the state was taken.

        The numbers of ranks and accumulation steps and `batch_size` may differ from those of the state, as long as
        their product is the same and the state was taken between two steps.

        Raises:
            UserError: the state belongs to another stream of samples, is no state of this class, or was taken inside a
                step that was divided otherwise.
        """
        position = {"epoch", "num_steps", "num_batches_of_step"}
        # A state of an earlier version lacks the names that are newer.
        missing = sorted((position | self._stream().keys()) - {"megabatch_steps"} - set(state or ()))
        if missing:
            raise UserError(f"not a state of BalancedBatchSampler: it lacks {', '.join(missing)}")
        for name, value in self._stream().items():
            if (was := state.get(name, 1)) != value:
                raise UserError(
                    f"the state is of {name}={was}, but this sampler has {name}={value}, so that its steps "
                    "hold other samples; make the sampler as it was when the state was taken, or start without the "
                    "state"
                )
        epoch, whole, part = (_at_least(0, name, state[name]) for name in ("epoch", "num_steps", "num_batches_of_step"))
        state = {"equal_sizes": True} | state
        other = [
            f"{name}={state.get(name)} (now {value})"
            for name, value in self._division().items()
            if state.get(name) != value
        ]
        if part and other:
            raise UserError(
                f"the state was taken after {part} of {state.get('num_accumulation_steps')} batches of a step, dealt "
                f"with {', '.join(other)}; resume with the old values, or from a state taken between two steps"
            )
        num_steps = -(-self._num_batches // self.num_accumulation_steps)
        if whole >= num_steps and epoch < self.epoch:
            return  # A finished epoch, loaded by a loader that puts off loading until the next epoch was set.
        self.epoch = epoch
        self._start = min(whole * self.num_accumulation_steps + part, self._num_batches)
        self._num_yielded = self._start

    def _stream(self) -> dict[str, Any]:
        """The settings that decide which samples make up which step."""
        size = self.batch_size * self.num_replicas * self.num_accumulation_steps
        return {
            "num_samples": len(self._costs),
            "samples_per_step": size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "megabatch_steps": self.megabatch_steps,
        }

    def _division(self) -> dict[str, Any]:
        """The settings that, with the costs, decide which rank computes which samples of a step."""
        names = ("batch_size", "num_replicas", "num_accumulation_steps")
        names += ("padded", "sync", "equal_sizes", "max_batch_bytes")
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
                begin, batches = step, self._batches_of(step, order)
            self._num_yielded = number + 1
            yield batches[microbatch]

    def _batches_of(self, step: int, order: np.ndarray) -> list[list[int]]:
        samples = self._samples_of(step, order)
        # Padded batches of equal sizes cannot be kept below a limit by regrouping: their largest sample is looked at.
        limit = None if self._limit is None or (self.padded and self.equal_sizes) else self._limit.of(samples)
        cells_of = balanced_cells if self.equal_sizes else unequal_cells
        division = {"padded": self.padded, "sync": self.sync, "limit": limit}
        try:
            cell = cells_of(self._costs[samples], self.num_replicas, self.batch_size, **division)
        except DoesNotFit:
            raise UserError(
                f"no way was found to keep the batches of step {step} (epoch {self.epoch}) within max_batch_bytes="
                f"{self.max_batch_bytes:,}: {self._about_largest(samples)}; raise it, or use a smaller batch_size"
            ) from None
        cells = range(self.rank, int(cell.max()) + 1, self.num_replicas)
        return [samples[cell == number].tolist() for number in cells]

    def _samples_of(self, step: int, order: np.ndarray) -> np.ndarray:
        size = self.batch_size * self.num_replicas * self.num_accumulation_steps
        first = step - step % self.megabatch_steps
        num_steps = min(self.megabatch_steps, self._num_samples_used // size - first)
        if num_steps < 2 or step >= first + num_steps:
            positions = np.arange(step * size, min((step + 1) * size, self._num_samples_used))
            return order[positions % len(order)]
        samples = order[np.arange(first * size, (first + num_steps) * size) % len(order)]
        by_cost = samples[np.argsort(cost_shares(self._costs[samples]).sum(axis=1), kind="stable")]
        generator = torch.Generator().manual_seed(self.seed + self.epoch + first)
        place = int(torch.randperm(num_steps, generator=generator)[step - first])
        return by_cost[place * size : (place + 1) * size]

    def _byte_limit(self, sample_bytes: Any) -> ByteLimit | None:
        """The limit of a batch, checked against each sample alone."""
        if (sample_bytes is None) != (self.max_batch_bytes is None):
            raise UserError("sample_bytes and max_batch_bytes belong together; give both or neither")
        if sample_bytes is None:
            return None
        most = _at_least(1, "max_batch_bytes", self.max_batch_bytes)
        held = np.ceil(_checked_numbers("sample_bytes", sample_bytes)).astype(np.int64)
        if held.shape != (len(self._costs), 1):
            raise UserError(
                f"sample_bytes must be one number for each of {len(self._costs)} samples, not {list(held.shape)}"
            )
        limit = ByteLimit(sample_bytes=held[:, 0], max_bytes=most)
        num_held = self.batch_size if self.padded and self.equal_sizes else 1
        too_large = limit.sample_bytes * num_held > most
        if too_large.any():
            first = int(too_large.argmax())
            padded = f", {num_held} times that in a padded batch of {num_held}" if num_held > 1 else ""
            raise UserError(
                f"sample {first} has {limit.sample_bytes[first]:,} bytes{padded}, more than max_batch_bytes={most:,} "
                f"({int(too_large.sum())} of {len(held)} samples do not fit); leave out such samples, "
                f"{'use a smaller batch_size or equal_sizes=False, ' if padded else ''}or raise max_batch_bytes"
            )
        return limit

    def _check_that_steps_fit(self, order: np.ndarray) -> None:
        """Raise a UserError for a sample that exceeds the limit even in a batch with the smallest ones of its step."""
        if self._limit is None or self.padded or not self.equal_sizes:
            return  # each sample fits alone, or in a batch of its like: it was looked at once
        most = self._limit.max_bytes
        for step in range(-(-self._num_batches // self.num_accumulation_steps)):
            samples = self._samples_of(step, order)
            held = np.sort(self._limit.sample_bytes[samples])
            smallest_batch = len(samples) // self.num_replicas % self.batch_size or self.batch_size
            least = int(held[-1] + held[: smallest_batch - 1].sum())
            if least > most:
                raise UserError(
                    f"{self._about_largest(samples)}; with the smallest {smallest_batch - 1} of its step (step {step} "
                    f"of epoch {self.epoch}) a batch of {smallest_batch} has {least:,} bytes, more than "
                    f"max_batch_bytes={most:,}; raise it, use a smaller batch_size, or leave out the sample"
                )

    def _about_largest(self, samples: np.ndarray) -> str:
        largest = int(samples[self._limit.sample_bytes[samples].argmax()])
        return f"sample {largest} has {self._limit.sample_bytes[largest]:,} bytes"


def _checked_numbers(name: str, values: Any) -> np.ndarray:
    """The values as an array `[num_samples, num_columns]`; an array that was given is not copied."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    elif isinstance(values, Sequence):
        values = values[:]  # This reads a column of a Hugging Face dataset at once, and not row by row.
    try:
        values = np.asarray(values)
    except ValueError as error:
        raise UserError(f"{name} must have the same number of columns for every sample") from error
    if values.ndim not in (1, 2) or values.size == 0 or values.dtype.kind not in "iuf":
        raise UserError(
            f"{name} must be numbers, [num_samples] or [num_samples, num_modules], and at least one sample's; "
            f"these are {values.dtype} of shape {list(values.shape)}"
        )
    values = values.reshape(len(values), -1)
    wrong = ~(np.isfinite(values) & (values >= 0)).all(axis=1)
    if wrong.any():
        first = int(wrong.argmax())
        found = ", ".join(str(value) for value in values[first].tolist())
        raise UserError(
            f"{name}: sample {first} has {found}, but it must be finite and not negative ({int(wrong.sum())} of "
            f"{len(values)} samples are not so); mend them, or leave these samples out of the dataset"
        )
    return values


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
