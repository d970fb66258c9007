"""DynaPipe: samples in the order of their lengths are cut into microbatches by a dynamic programme.

Jiang et al., "DynaPipe: optimizing multi-task training through dynamic pipelines", EuroSys '24, arXiv 2311.10418. All
cuts into a given number of microbatches have the same total cost, so the one whose largest microbatch is smallest gives
the fastest pipeline. Replicas get microbatches by the longest processing time first. DynaPipe pads within a microbatch;
here no system pads.
"""

import numpy as np

from dflop.balance import BatchProblem, Policy
from dflop.comparison.packing import contiguous, longest_first
from dflop.comparison.system import System, bucket_numbers, fastest_of
from dflop.comparison.systems import megatron

__all__ = ["SYSTEM"]


class _DynaPipe(Policy):
    name = "dynapipe"

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        whole_s, num_microbatches = problem.loads_s.sum(axis=1), problem.num_microbatches
        order = np.argsort(problem.llm_tokens, kind="stable")
        cut = np.empty(len(order), dtype=np.int64)
        cut[order] = contiguous(whole_s[order], problem.num_buckets)
        of_cut_s = np.bincount(cut, weights=whole_s, minlength=problem.num_buckets)
        rank_of_cut = longest_first(of_cut_s, problem.num_dp_ranks, equally_many=True)
        turn = np.argsort(rank_of_cut, kind="stable")
        place_of_cut = np.argsort(turn) % num_microbatches
        return bucket_numbers(rank_of_cut[cut], place_of_cut[cut], num_microbatches)


SYSTEM = System(name="DynaPipe-style", plans=fastest_of(megatron.WITHIN, splits_evenly=False), policy=_DynaPipe())
