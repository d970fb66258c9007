"""LoongForge: the encoder data-parallel on all ranks, batches by the longest processing time first, moves and swaps.

By its documentation (github.com/baidu-baige/LoongForge), the encoder's layout is independent of the LLM's, and samples
are balanced over the replicas by fitted costs. Here our policy `lpt`, which is of the same kind, balances all modules
at once.
"""

from dflop.balancing import lpt_buckets
from dflop.comparison.system import Batch, System, fastest_of
from dflop.config import PlanConfig
from dflop.parallelism import COLOCATED, PLAIN_SCHEDULE, PLAIN_SHARDING
from dflop.pricing import Assignment

__all__ = ["SYSTEM"]


def _decide(batch: Batch) -> Assignment:
    return batch.of_buckets(lpt_buckets(batch.problem))


SYSTEM = System(
    name="LoongForge-style",
    plans=fastest_of(
        PlanConfig(placements=[COLOCATED.name], schedules=[PLAIN_SCHEDULE], shardings=[PLAIN_SHARDING]),
        splits_evenly=False,
    ),
    decide=_decide,
)
