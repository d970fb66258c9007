"""Pipeline schedules, by the names that a plan and the config call them.

What orders, checks, simulates, prices or searches plans asks a schedule's object and never compares its name. So a new
schedule is one more file in this folder, with its object as SCHEDULE.
"""

from dflop.parallelism.schedules.one_f_one_b import SCHEDULE as _PLAIN
from dflop.parallelism.schedules.schedule import Schedule
from dflop.parallelism.tables import each_named

__all__ = ["PLAIN_SCHEDULE", "SCHEDULES", "Schedule"]

SCHEDULES: dict[str, Schedule] = {own.name: own for own in each_named("dflop.parallelism.schedules.*.SCHEDULE")}
# Where there is nothing to order, this one stands for all.
PLAIN_SCHEDULE = _PLAIN.name
