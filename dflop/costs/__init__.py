"""Costs: measuring modules on a device or counting what they do, fitting, and the model that predicts time and memory.

`measure`, `worker` and `links` need torch; they run in the ranks that `dflop profile-costs` and `profile-links` start.
"""

from dflop.costs.analytic import AnalyticPoints, analytic_points, module_work
from dflop.costs.fit import fit_costs
from dflop.costs.link_model import Link, LinkModel, fit_links, read_links
from dflop.costs.measured import Measured, read_measured, write_measured
from dflop.costs.model import CostModel, Loads, StageMemory

__all__ = [
    "AnalyticPoints",
    "CostModel",
    "Link",
    "LinkModel",
    "Loads",
    "Measured",
    "StageMemory",
    "analytic_points",
    "fit_costs",
    "fit_links",
    "module_work",
    "read_links",
    "read_measured",
    "write_measured",
]
