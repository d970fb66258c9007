"""Fully sharded data parallelism with our own batch sampler (`dflop.balance.sampler`), which any trainer can use.

Replicas wait for each other in every layer, so each microbatch is balanced on its own, over all modules at once. The
sampler gives all microbatches equally many samples. Where a batch cannot be divided so, `lpt_buckets` packs it.
"""

import numpy as np

from dflop.balance import BatchProblem, Policy, balanced_cells, lpt_buckets
from dflop.comparison.system import System, bucket_numbers, fastest_of
from dflop.comparison.systems.fsdp_random import whole_on_every_device

__all__ = ["SYSTEM"]


class _BySampler(Policy):
    name = "sampler"

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        dp, num_microbatches = problem.num_dp_ranks, problem.num_microbatches
        size, rest = divmod(problem.num_samples, dp * num_microbatches)
        if rest:
            return lpt_buckets(problem)
        cell = balanced_cells(problem.loads_s, dp, size)
        microbatch, rank = np.divmod(cell, dp)
        return bucket_numbers(rank, microbatch, num_microbatches)


SYSTEM = System(
    name="FSDP, balanced by our sampler",
    baseline="every device the whole model, balanced batches (FSDP-style)",
    plans=fastest_of(whole_on_every_device),
    policy=_BySampler(),
)
