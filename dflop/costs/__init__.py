"""Costs: measuring modules on a device or counting what they do, fitting, and the model that predicts time and memory.

`measure` needs torch and is imported by `dflop profile-costs` alone.
"""

from dflop.costs.analytic import AnalyticPoints, DeviceModel, analytic_points, load_device, module_work
from dflop.costs.fit import fit_costs
from dflop.costs.model import CostModel, Loads, StageMemory

__all__ = [
    "AnalyticPoints",
    "CostModel",
    "DeviceModel",
    "Loads",
    "StageMemory",
    "analytic_points",
    "fit_costs",
    "load_device",
    "module_work",
]
