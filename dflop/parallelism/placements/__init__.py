"""Placements, by their names in plans and in the config.

Code that lays out, orders, checks, prices or searches plans asks a placement's object and never compares its name. So a
new placement is one more file in this folder, with its object as PLACEMENT.
"""

from dflop.parallelism.placements.colocated import PLACEMENT as COLOCATED
from dflop.parallelism.placements.disjoint import PLACEMENT as DISJOINT
from dflop.parallelism.placements.monolithic import PLACEMENT as MONOLITHIC
from dflop.parallelism.placements.placement import Placement
from dflop.parallelism.tables import each_named

__all__ = ["COLOCATED", "DISJOINT", "MONOLITHIC", "PLACEMENTS", "Placement"]

PLACEMENTS: dict[str, Placement] = {own.name: own for own in each_named("dflop.parallelism.placements.*.PLACEMENT")}
