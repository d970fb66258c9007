"""What a plan is made of: grids, and the placements, pipeline schedules and shardings that there are.

These are light to import: the config takes its choices from here, and the workflow reads it again for every job. What
they come to, in instructions and in seconds, is `pipeline`'s to say.
"""

from dflop.parallelism.grid import Grid, tile_world
from dflop.parallelism.placements import COLOCATED, DISJOINT, MONOLITHIC, PLACEMENTS, Placement
from dflop.parallelism.plan import Plan, split_layers
from dflop.parallelism.plan_file import load_plan, plan_from_dict
from dflop.parallelism.schedules import PLAIN_SCHEDULE, SCHEDULES, Schedule
from dflop.parallelism.shardings import PLAIN_SHARDING, SHARDINGS, Sharding
from dflop.parallelism.tables import modules_named

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
    "Schedule",
    "Sharding",
    "load_plan",
    "modules_named",
    "plan_from_dict",
    "split_layers",
    "tile_world",
]
