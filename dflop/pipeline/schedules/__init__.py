"""Pipeline schedules, one file each; every file of the folder is imported, and registers its own."""

import importlib
import pkgutil

from dflop.pipeline.schedules.one_f_one_b import PLAIN_SCHEDULE
from dflop.pipeline.schedules.schedule import SCHEDULES, Schedule, register_schedule

__all__ = ["PLAIN_SCHEDULE", "SCHEDULES", "Schedule", "register_schedule"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
