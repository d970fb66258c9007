"""What a plan is made of: grids, placements, pipeline schedules and shardings.

This package is light to import, because the config takes its choices from here and every job of the workflow reads the
config again. `step` turns a plan into instructions and simulates them.
"""

from dflop.plan.grid import Grid, tile_world
from dflop.plan.placements import COLOCATED, DISJOINT, MONOLITHIC, PLACEMENTS, Placement
from dflop.plan.plan import Plan, split_layers
from dflop.plan.plan_file import check_layers, load_plan, plan_from_dict, read_plan_file
from dflop.plan.schedules import PLAIN_SCHEDULE, SCHEDULES
from dflop.plan.shardings import PLAIN_SHARDING, SHARDINGS

__all__ = [
    "COLOCATED",
    "DISJOINT",
    "MONOLITHIC",
    "PLACEMENTS",
    "PLAIN_SCHEDULE",
    "PLAIN_SHARDING",
    "SCHEDULES",
    "SHARDINGS",
    "Grid",
    "Placement",
    "Plan",
    "check_layers",
    "load_plan",
    "plan_from_dict",
    "read_plan_file",
    "split_layers",
    "tile_world",
]
