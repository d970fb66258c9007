"""Random: equally many samples for each bucket, to within one, as in training without a scheduler."""

import numpy as np

from dflop.balance.packing import dealt_at_random, random_buckets
from dflop.balance.policies.policy import DrawnBatch, Policy
from dflop.balance.problem import BatchProblem

__all__ = ["POLICY"]


class Random(Policy):
    name = "random"

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        return random_buckets(problem, rng)

    def quick(self, drawn: DrawnBatch, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        return np.divmod(dealt_at_random(len(drawn), dp * num_microbatches, drawn.rng), num_microbatches)


POLICY = Random()
