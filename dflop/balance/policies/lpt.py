"""LPT: the longest processing time first over all modules, then moves and swaps until buckets are equal.

The scheduler also tries small microbatches at both ends of the pipeline's order.
"""

from functools import lru_cache

import numpy as np

from dflop.balance.packing import lpt_buckets, small_at_both_ends
from dflop.balance.policies.policy import DrawnBatch, Policy
from dflop.balance.problem import BatchProblem
from dflop.base.kernels import kernel

__all__ = ["POLICY", "Lpt", "drawn_in_turns"]


class Lpt(Policy):
    name = "lpt"
    may_reorder = True

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        return lpt_buckets(problem)

    def quick(self, drawn: DrawnBatch, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """Even buckets without moves and swaps, small ones first and last on every replica."""
        return _drawn_in_turns(*drawn.even_buckets(dp * num_microbatches), dp, _places(num_microbatches))


def drawn_in_turns(bucket: np.ndarray, load: np.ndarray, dp: int) -> tuple[np.ndarray, np.ndarray]:
    """Replica and microbatch of each sample, where buckets of about the same `load` [num_buckets] are those of one
    microbatch, and small ones come first and last."""
    return _drawn_in_turns(bucket, np.argsort(-load, kind="stable"), dp, _places(len(load) // dp))


@lru_cache(maxsize=64)
def _places(num_microbatches: int) -> np.ndarray:
    """The place in a replica's order of its largest microbatch, its second largest and so on: large ones in the
    middle."""
    return np.argsort(small_at_both_ends(-np.arange(num_microbatches)))


@kernel
def _drawn_in_turns(bucket, by_load, dp, places):
    """Replica and microbatch of each sample. Replicas draw buckets in turns, the largest first, in alternating
    directions, so that all get about the same load. The bucket of turn t becomes microbatch `places[t]`."""
    replica, microbatch = np.empty(len(by_load), dtype=np.int64), np.empty(len(by_load), dtype=np.int64)
    for turn in range(len(places)):
        for place in range(dp):
            drawn = by_load[turn * dp + (dp - 1 - place if turn % 2 else place)]
            replica[drawn], microbatch[drawn] = place, places[turn]
    return replica[bucket], microbatch[bucket]


POLICY = Lpt()
