"""Search: the better of equal buckets and buckets of the sizes that suit the pipeline, changed as long as the simulated
step gets shorter."""

from collections.abc import Callable

import numpy as np

from dflop.balance.packing import lpt_buckets
from dflop.balance.policies.lpt import POLICY as LPT
from dflop.balance.policies.lpt import Lpt
from dflop.balance.policies.policy import Packing
from dflop.balance.problem import BatchProblem

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
