"""verl's balancing: FSDP, and the largest differencing method of Karmarkar and Karp on the lengths of samples.

Sheng et al., "HybridFlow: a flexible and efficient RLHF framework", EuroSys '25, and verl's documentation
(`balance_batch`); Karmarkar and Karp, "The differencing method of set partitioning", 1982. A sample's length is the
number of its LLM tokens; the encoders' work does not count.
"""

import numpy as np

from dflop.balance import BatchProblem, Policy
from dflop.comparison.packing import differencing
from dflop.comparison.system import System, fastest_of
from dflop.comparison.systems.fsdp_random import whole_on_every_device

__all__ = ["SYSTEM"]


class _KarmarkarKarp(Policy):
    name = "karmarkar_karp"

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        return differencing(problem.llm_tokens, problem.num_buckets)


SYSTEM = System(name="FSDP, Karmarkar-Karp", plans=fastest_of(whole_on_every_device), policy=_KarmarkarKarp())
