"""Which samples make up a global batch: a seeded shuffle of the dataset, epoch after epoch.

The batch depends only on the seed, the step, the samples and the batch size. So a run can be resumed at any step and on
another number of devices, and a scheduled run sees the same batches as an unscheduled one.

Sources may be drawn more or less often than once an epoch. Each is a stream of its own: its samples shuffled, pass
after pass. With 2.5 passes an epoch, the first epoch ends in the middle of the third pass; the second begins there.
"""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from dflop.base import UserError
from dflop.shapes import SampleShapes

__all__ = ["EvaluationBatches", "GlobalBatches", "steps_in_epochs"]


def steps_in_epochs(epochs: float, num_samples: float, global_batch_size: int) -> int:
    """How many steps so many epochs of `num_samples` draws take: whole global batches, at least one."""
    return max(1, math.ceil(epochs * num_samples / global_batch_size - 1e-9))


class GlobalBatches:
    """`batches[step]` is an index array [global_batch_size] into the samples."""

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        seed: int,
        draws: Sequence[tuple[np.ndarray, float]] | None = None,
        among: tuple[np.ndarray, int] | None = None,
    ) -> None:
        """`draws` are `SampleShapes.draws`; by default an epoch draws each sample once. `among` are the samples' places
        among all, and the number of all, where some are left out: the others then keep their order.

        Raises:
            UserError: when one batch would need more samples than there are, or than an epoch draws.
        """
        if num_samples == 0:
            raise UserError("there are no samples to draw a global batch from; add data, or see why all were rejected")
        if global_batch_size > num_samples:
            raise UserError(
                f"`train.global_batch_size` is {global_batch_size}, but there are only {num_samples} samples; "
                f"lower it to {num_samples} or add data"
            )
        self._draws = [(np.arange(num_samples), float(num_samples))] if draws is None else draws
        self.samples_per_epoch = sum(per_epoch for _, per_epoch in self._draws)
        if global_batch_size > self.samples_per_epoch:
            raise UserError(
                f"`train.global_batch_size` is {global_batch_size}, but an epoch draws only {self.samples_per_epoch:g} "
                "samples; lower it, or raise `data.sources[].epochs`"
            )
        self.global_batch_size, self._seed, self._among = global_batch_size, seed, among
        self._epochs: dict[int, np.ndarray] = {}

    @classmethod
    def of(cls, samples: SampleShapes, global_batch_size: int, seed: int) -> Self:
        """The batches of these samples, drawn as often as their sources ask for."""
        return cls(len(samples), global_batch_size, seed, samples.draws(), samples.among)

    def steps_in(self, epochs: float) -> int:
        """How many steps so many epochs take."""
        return steps_in_epochs(epochs, self.samples_per_epoch, self.global_batch_size)

    def __getitem__(self, step: int) -> np.ndarray:
        start = step * self.global_batch_size
        first = max(0, int(start / self.samples_per_epoch) - 1)
        while self._drawn_before(first + 1) <= start:
            first += 1
        last = first
        while self._drawn_before(last + 1) < start + self.global_batch_size:
            last += 1
        parts, offset = [], start - self._drawn_before(first)
        for epoch in range(first, last + 1):  # a part of each: a copy of whole epochs would take longer than all else
            order = self._shuffled(epoch)
            parts.append(order[max(0, offset) :][: self.global_batch_size - sum(map(len, parts))])
            offset -= len(order)
        return np.concatenate(parts)

    def _drawn_before(self, epoch: int) -> int:
        """How many samples the epochs before this one draw."""
        return sum(_passed(epoch, per_epoch) for _, per_epoch in self._draws)

    def _shuffled(self, epoch: int) -> np.ndarray:
        """The samples that an epoch draws, in their order."""
        if epoch not in self._epochs:
            self._epochs = {known: order for known, order in self._epochs.items() if known >= epoch - 1}
            drawn = [
                self._of_source(number, index, _passed(epoch, per_epoch), _passed(epoch + 1, per_epoch))
                for number, (index, per_epoch) in enumerate(self._draws)
            ]
            self._epochs[epoch] = self._in_order(epoch, np.sort(np.concatenate(drawn)))
        return self._epochs[epoch]

    def _in_order(self, epoch: int, drawn: np.ndarray) -> np.ndarray:
        """The samples `drawn`, shuffled. If each is drawn once, the order is that of all samples without those that are
        left out: where more of them are, as on devices with less memory, a resumed run goes on with the rest."""
        rng = np.random.default_rng([self._seed, epoch])
        if self._among is None or not np.array_equal(drawn, np.arange(len(self._among[0]))):
            return rng.permutation(drawn)
        places, num_all = self._among
        sample = np.full(num_all, -1)
        sample[places] = drawn
        order = sample[rng.permutation(num_all)]
        return order[order >= 0]

    def _of_source(self, number: int, index: np.ndarray, start: int, end: int) -> np.ndarray:
        """Draws `start` to `end` of a source's samples."""
        size, parts = len(index), [index[:0]]
        for turn in range(start // size, -(-end // size)):
            own = slice(max(start - turn * size, 0), min(end - turn * size, size))
            is_whole = own == slice(0, size)
            order = slice(None) if is_whole else np.random.default_rng([self._seed, turn, 1 + number]).permutation(size)
            parts.append(index[order][own])
        return np.concatenate(parts)


def _passed(epoch: int, per_epoch: float) -> int:
    """How many samples epochs before this one draw from a source."""
    return math.floor(epoch * per_epoch + 1e-6)


class EvaluationBatches:
    """All samples in their order, cut into batches of about the same size; `batches[number]` is an index array.

    A batch has at most `global_batch_size` samples, unless it then could not fill all buckets.
    """

    def __init__(self, num_samples: int, global_batch_size: int, num_buckets: int) -> None:
        """Raise `UserError` where there are fewer samples than buckets."""
        if num_samples < num_buckets:
            raise UserError(
                f"{num_samples} samples are held out for evaluation, and the plan's {num_buckets} microbatches need "
                "one each; raise `data.evaluation_share`, or add sources with `evaluation: true`"
            )
        self.num_samples, self.global_batch_size = num_samples, global_batch_size
        num_batches = max(1, min(-(-num_samples // global_batch_size), num_samples // num_buckets))
        self._parts = np.array_split(np.arange(num_samples), num_batches)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._parts[number]
