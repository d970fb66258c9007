"""OrchMLLM: every device computes a share of the encoder, too, and each phase is balanced anew over the replicas.

Zheng et al., "OrchMLLM: orchestrate multimodal data with batch post-balancing to accelerate multimodal large language
model training", arXiv 2503.23830. The LLM's phase is balanced by the LLM's work alone. Media are balanced over the
encoder's replicas by the encoder's work, independently of the samples' LLM replicas. Our plans with modules on shared
devices all do the latter.
"""

import numpy as np

from dflop.balance import BatchProblem, Policy
from dflop.comparison.packing import longest_first
from dflop.comparison.system import System, fastest_of
from dflop.config import PlanConfig
from dflop.plan import COLOCATED, PLAIN_SCHEDULE, SHARDINGS

__all__ = ["SYSTEM"]


class _OrchMllm(Policy):
    name = "orchmllm"

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        return longest_first(problem.loads_s[:, -1], problem.num_buckets)


SYSTEM = System(
    name="OrchMLLM-style",
    plans=fastest_of(
        PlanConfig(placements=[COLOCATED.name], schedules=[PLAIN_SCHEDULE], shardings=list(SHARDINGS)),
        splits_evenly=False,
    ),
    policy=_OrchMllm(),
)
