"""Placements, by their names in plans and in the config.

Code that lays out, orders, checks, prices or searches plans asks a placement's object and never compares its name. So a
new placement is one more file in this folder, with its object as PLACEMENT.
"""

from dflop.base.tables import table_of
from dflop.plan.placements.colocated import PLACEMENT as COLOCATED
from dflop.plan.placements.disjoint import PLACEMENT as DISJOINT
from dflop.plan.placements.monolithic import PLACEMENT as MONOLITHIC
from dflop.plan.placements.placement import Placement

__all__ = ["COLOCATED", "DISJOINT", "MONOLITHIC", "PLACEMENTS", "Placement"]

PLACEMENTS: dict[str, Placement] = table_of(__name__, "PLACEMENT")
