"""Shardings, by their names in plans and in the config.

Code that checks, prices, searches or trains plans asks a sharding's object and never compares its name. So a new
sharding is one more file in this folder, with its object as SHARDING.
"""

from dflop.base.tables import table_of
from dflop.plan.shardings.optimizer import SHARDING as PLAIN
from dflop.plan.shardings.sharding import Sharding

__all__ = ["PLAIN_SHARDING", "SHARDINGS", "Sharding"]

PLAIN_SHARDING = PLAIN.name
SHARDINGS: dict[str, Sharding] = table_of(__name__, "SHARDING")
