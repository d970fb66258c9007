"""Comparison of published training systems with ours, on the same batches, costs and cluster, by one simulator.

`systems/` has a file for each system; `compare` prices them, `table` writes the results. `ablation` compares parts of
our system, `scaling` repeats the comparison at several sizes of the cluster. `contenders` are the systems that can be
trained here, and `measured` puts their measured times beside the predicted ones.
"""

from dflop.comparison.ablation import ABLATION
from dflop.comparison.compare import OURS, SystemRow, compare_systems
from dflop.comparison.contenders import OURS_AT_RANDOM, Contender, contenders
from dflop.comparison.measured import Clocked, measured_frame, measured_text
from dflop.comparison.scaling import keys_of_size, scaling_frame, scaling_text
from dflop.comparison.systems import SYSTEMS, TODAYS, systems_of
from dflop.comparison.table import comparison_frame, comparison_json, comparison_text

__all__ = [
    "ABLATION",
    "OURS",
    "OURS_AT_RANDOM",
    "SYSTEMS",
    "TODAYS",
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
    "systems_of",
]
