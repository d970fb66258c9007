"""Entrain: one layout for all steps, in which the encoder's work is made equal first.

"Entrain", arXiv 2605.27918. Microbatches get equal encoder work by the longest processing time first. Samples without
media, and then the order of microbatches, even out the LLM's work. Its third part is left out: it moves LLM work to a
later microbatch than the encoder's, while in our plans a sample is in one microbatch for all modules.
"""

import numpy as np

from dflop.balance import BatchProblem, Policy, small_at_both_ends
from dflop.comparison.packing import longest_first
from dflop.comparison.system import System, bucket_numbers, fastest_of
from dflop.config import PlanConfig
from dflop.plan import COLOCATED, DISJOINT, PLAIN_SCHEDULE, PLAIN_SHARDING

__all__ = ["SYSTEM"]


class _Entrain(Policy):
    name = "entrain"

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        encoder_s, llm_s = problem.loads_s[:, :-1].sum(axis=1), problem.loads_s[:, -1]
        num_buckets, num_microbatches = problem.num_buckets, problem.num_microbatches
        with_media = np.flatnonzero(encoder_s)
        bucket = np.full(len(llm_s), -1)
        bucket[with_media] = longest_first(encoder_s[with_media], num_buckets)
        held_s = np.bincount(bucket[with_media], weights=llm_s[with_media], minlength=num_buckets)
        rest = np.flatnonzero(bucket < 0)
        bucket[rest] = longest_first(llm_s[rest], num_buckets, held_s)
        rank, microbatch = np.divmod(bucket, num_microbatches)
        order = small_at_both_ends(np.bincount(microbatch, weights=llm_s, minlength=num_microbatches))
        place = np.argsort(order)
        return bucket_numbers(rank, place[microbatch], num_microbatches)


SYSTEM = System(
    name="Entrain-style",
    plans=fastest_of(
        PlanConfig(placements=[DISJOINT.name, COLOCATED.name], schedules=[PLAIN_SCHEDULE], shardings=[PLAIN_SHARDING]),
        splits_evenly=False,
    ),
    policy=_Entrain(),
)
