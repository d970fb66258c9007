"""DistTrain: the encoder on devices of its own, samples reordered between replicas and between microbatches.

Zhang et al., "DistTrain: addressing model and data heterogeneity with disaggregated training for multimodal large
language models", arXiv 2408.04275. Within a microbatch, samples go to the replicas by the longest processing time
first. Small microbatches come first and last, where the pipeline fills and drains. The paper does not say how samples
are divided among microbatches: here equally many go to each, in the order in which they were drawn.
"""

import numpy as np

from dflop.balance import BatchProblem, Policy, small_at_both_ends
from dflop.comparison.packing import longest_first
from dflop.comparison.system import System, bucket_numbers, fastest_of
from dflop.config import PlanConfig
from dflop.plan import DISJOINT, PLAIN_SCHEDULE, PLAIN_SHARDING

__all__ = ["SYSTEM"]


class _DistTrain(Policy):
    name = "disttrain"

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        loads_s, num_microbatches = problem.loads_s, problem.num_microbatches
        whole_s = loads_s.sum(axis=1)
        drawn = np.arange(len(whole_s)) * num_microbatches // len(whole_s)
        rank = np.empty(len(whole_s), dtype=np.int64)
        for number in range(num_microbatches):
            samples = np.flatnonzero(drawn == number)
            rank[samples] = longest_first(whole_s[samples], problem.num_dp_ranks)
        order = small_at_both_ends(np.bincount(drawn, weights=whole_s, minlength=num_microbatches))
        place = np.argsort(order)
        return bucket_numbers(rank, place[drawn], num_microbatches)


SYSTEM = System(
    name="DistTrain-style",
    plans=fastest_of(
        PlanConfig(placements=[DISJOINT.name], schedules=[PLAIN_SCHEDULE], shardings=[PLAIN_SHARDING]),
        splits_evenly=False,
    ),
    policy=_DistTrain(),
)
