"""Megatron-LM's usual way: the encoder in the LLM's first stage, one layout for both, batches as they are drawn.

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC '21.
"""

from dflop.balance import RANDOM
from dflop.comparison.system import System, fastest_of
from dflop.config import PlanConfig
from dflop.plan import MONOLITHIC, PLAIN_SCHEDULE, PLAIN_SHARDING

__all__ = ["POLICY", "SYSTEM", "WITHIN"]

WITHIN = PlanConfig(placements=[MONOLITHIC.name], schedules=[PLAIN_SCHEDULE], shardings=[PLAIN_SHARDING])
POLICY = RANDOM


SYSTEM = System(
    name="Megatron-style, random",
    baseline="monolithic, random batches (Megatron-style)",
    plans=fastest_of(WITHIN, policy=POLICY),
    policy=POLICY,
    moves_samples=False,
)
