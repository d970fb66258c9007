"""Costs: measuring modules on a device or counting what they do, fitting, and the model that predicts time and memory.

`measure` and `worker` need torch; they run in the ranks that `dflop profile-costs` starts.
"""

from dflop.costs.analytic import AnalyticPoints, analytic_points, module_work
from dflop.costs.devices import DeviceModel, load_device
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
