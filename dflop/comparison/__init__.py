"""Comparison: published ways to train beside ours, on the same batches, costs and cluster, by one simulator.

`systems/` has a file for each; `compare` prices them, `table` writes down what was found. `ablation` takes ours apart,
`scaling` does it all at several sizes of the cluster, `contenders` are rows that can be carried out, and `measured`
sets what that took beside what was predicted.
"""

from dflop.comparison.ablation import ABLATION
from dflop.comparison.compare import OURS, SystemRow, compare_systems
from dflop.comparison.contenders import OURS_AT_RANDOM, Contender, contenders
from dflop.comparison.measured import Clocked, measured_frame, measured_text
from dflop.comparison.scaling import keys_of_size, scaling_frame, scaling_text
from dflop.comparison.systems import SYSTEMS
from dflop.comparison.table import comparison_frame, comparison_json, comparison_text

__all__ = [
    "ABLATION",
    "OURS",
    "OURS_AT_RANDOM",
    "SYSTEMS",
    "Clocked",
    "Contender",
    "SystemRow",
    "compare_systems",
    "comparison_frame",
    "comparison_json",
    "comparison_text",
    "contenders",
    "keys_of_size",
    "measured_frame",
    "measured_text",
    "scaling_frame",
    "scaling_text",
]
