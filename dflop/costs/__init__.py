"""Costs: measuring modules on a device, fitting, and the model that predicts time and memory.

`measure` needs torch and is imported by `dflop profile-costs` alone.
"""

from dflop.costs.fit import fit_costs
from dflop.costs.model import CostModel, Loads, StageMemory

__all__ = ["CostModel", "Loads", "StageMemory", "fit_costs"]
