"""Placements, one file each; every file of the folder is imported, and registers its own."""

import importlib
import pkgutil

from dflop.pipeline.placements.disjoint import DISJOINT
from dflop.pipeline.placements.monolithic import MONOLITHIC
from dflop.pipeline.placements.placement import PLACEMENTS, Placement, register_placement

__all__ = ["DISJOINT", "MONOLITHIC", "PLACEMENTS", "Placement", "register_placement"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
