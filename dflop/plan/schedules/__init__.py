"""Pipeline schedules, by their names in plans and in the config.

Code that orders, checks, simulates, prices or searches plans asks a schedule's object and never compares its name. So a
new schedule is one more file in this folder, with its object as SCHEDULE.
"""

from dflop.base.tables import table_of
from dflop.plan.schedules.one_f_one_b import SCHEDULE as _PLAIN
from dflop.plan.schedules.schedule import Schedule

__all__ = ["PLAIN_SCHEDULE", "REMOVED_SCHEDULES", "SCHEDULES", "Schedule"]

SCHEDULES: dict[str, Schedule] = table_of(__name__, "SCHEDULE")
# The one that is used where all schedules give the same order.
PLAIN_SCHEDULE = _PLAIN.name
# Former schedules, which configs and plans may still name.
REMOVED_SCHEDULES = ("zb_h1",)
