"""Megatron-LM's usual way: the encoder in the LLM's first stage, one layout for both, batches as they are drawn.

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC '21.
"""

from dflop.balancing import dealt_at_random
from dflop.comparison.system import Batch, System, fastest_of
from dflop.config import PlanConfig
from dflop.parallelism import MONOLITHIC, PLAIN_SCHEDULE, PLAIN_SHARDING
from dflop.pricing import Assignment

__all__ = ["GROUPING", "SYSTEM", "WITHIN"]

WITHIN = PlanConfig(placements=[MONOLITHIC.name], schedules=[PLAIN_SCHEDULE], shardings=[PLAIN_SHARDING])
GROUPING = "random"


def _decide(batch: Batch) -> Assignment:
    return batch.of_buckets(dealt_at_random(len(batch.shapes), batch.plan.num_buckets, batch.rng))


SYSTEM = System(
    name="Megatron-style, random",
    baseline="monolithic, random batches (Megatron-style)",
    plans=fastest_of(WITHIN, grouping=GROUPING),
    decide=_decide,
)
