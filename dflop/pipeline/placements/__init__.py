"""Placements, by the names that a plan and the config call them.

What lays out, orders, checks, prices or searches plans asks a placement's object and never compares its name. So a new
placement is one more file in this folder, with its object as PLACEMENT.
"""

from dflop.pipeline.placements.disjoint import PLACEMENT as DISJOINT
from dflop.pipeline.placements.monolithic import PLACEMENT as MONOLITHIC
from dflop.pipeline.placements.placement import Placement
from dflop.pipeline.tables import each_named

__all__ = ["DISJOINT", "MONOLITHIC", "PLACEMENTS", "Placement"]

PLACEMENTS: dict[str, Placement] = {own.name: own for own in each_named("dflop.pipeline.placements.*.PLACEMENT")}
