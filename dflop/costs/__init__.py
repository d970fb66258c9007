"""Costs: measuring modules on a device or counting what they do, fitting, and the model that predicts time and memory.

`measure` needs torch and is imported by `dflop profile-costs` alone; `links`, too, is what torchrun starts.
"""

from dflop.costs.analytic import AnalyticPoints, DeviceModel, analytic_points, load_device, module_work
from dflop.costs.fit import fit_costs
from dflop.costs.link_model import Link, LinkModel, fit_links, read_links
from dflop.costs.model import CostModel, Loads, StageMemory

__all__ = [
    "AnalyticPoints",
    "CostModel",
    "DeviceModel",
    "Link",
    "LinkModel",
    "Loads",
    "StageMemory",
    "analytic_points",
    "fit_costs",
    "fit_links",
    "load_device",
    "module_work",
    "read_links",
]
