"""Search: the better of equal buckets and buckets of the sizes that suit the pipeline, changed as long as the simulated
step gets shorter."""

from collections.abc import Callable

import numpy as np

from dflop.balancing.packing import lpt_buckets
from dflop.balancing.policies.lpt import POLICY as LPT
from dflop.balancing.policies.lpt import Lpt
from dflop.balancing.policies.policy import Packing
from dflop.balancing.problem import BatchProblem

__all__ = ["POLICY", "Search"]


class Search(Lpt):
    name = "search"
    searches = True

    def packings(
        self, problem: BatchProblem, rng: np.random.Generator, ideal_shares: Callable[[], np.ndarray]
    ) -> dict[str, Packing]:
        share = ideal_shares()
        return {
            LPT.name: Packing(self.buckets(problem, rng)),
            "small ends": Packing(lpt_buckets(problem, share), share),
        }


POLICY = Search()
