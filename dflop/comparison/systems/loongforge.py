"""LoongForge: the encoder data-parallel on all ranks, batches by the longest processing time first, moves and swaps.

By its documentation (github.com/baidu-baige/LoongForge), the encoder's layout is independent of the LLM's, and samples
are balanced over the replicas by fitted costs. Here our policy `lpt`, which is of the same kind, balances all modules
at once.
"""

from dflop.balance import LPT
from dflop.comparison.system import System, fastest_of
from dflop.config import PlanConfig
from dflop.plan import COLOCATED, PLAIN_SCHEDULE, PLAIN_SHARDING

__all__ = ["SYSTEM"]


SYSTEM = System(
    name="LoongForge-style",
    plans=fastest_of(
        PlanConfig(placements=[COLOCATED.name], schedules=[PLAIN_SCHEDULE], shardings=[PLAIN_SHARDING]),
        splits_evenly=False,
    ),
    policy=LPT,
)
