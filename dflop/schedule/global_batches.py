"""Which samples make up a global batch: a seeded shuffle of the dataset, epoch after epoch.

The batch depends only on the seed, the step, the number of samples and the batch size. So a run can be resumed at any
step, and a scheduled run sees the same batches as an unscheduled one.
"""

import math

import numpy as np

from dflop.base import UserError

__all__ = ["EvaluationBatches", "GlobalBatches", "steps_in_epochs"]


def steps_in_epochs(epochs: float, num_samples: int, global_batch_size: int) -> int:
    """How many steps it takes to draw every sample `epochs` times: whole global batches, at least one."""
    return max(1, math.ceil(epochs * num_samples / global_batch_size - 1e-9))


class GlobalBatches:
    """`batches[step]` is an index array [global_batch_size] into the samples."""

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        """Raise `UserError` when one batch would need more samples than there are."""
        if num_samples == 0:
            raise UserError("there are no samples to draw a global batch from; add data, or see why all were rejected")
        if global_batch_size > num_samples:
            raise UserError(
                f"`train.global_batch_size` is {global_batch_size}, but there are only {num_samples} samples; "
                f"lower it to {num_samples} or add data"
            )
        self.num_samples, self.global_batch_size, self._seed = num_samples, global_batch_size, seed
        self._epochs: dict[int, np.ndarray] = {}

    def steps_in(self, epochs: float) -> int:
        """How many steps it takes to draw every sample `epochs` times."""
        return steps_in_epochs(epochs, self.num_samples, self.global_batch_size)

    def __getitem__(self, step: int) -> np.ndarray:
        start = step * self.global_batch_size
        first, last = start // self.num_samples, (start + self.global_batch_size - 1) // self.num_samples
        stream = np.concatenate([self._shuffled(epoch) for epoch in range(first, last + 1)])
        offset = start - first * self.num_samples
        return stream[offset : offset + self.global_batch_size]

    def _shuffled(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            self._epochs = {known: order for known, order in self._epochs.items() if known >= epoch - 1}
            self._epochs[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self.num_samples)
        return self._epochs[epoch]


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
