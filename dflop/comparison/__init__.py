"""Comparison: published ways to train beside ours, on the same batches, costs and cluster, by one simulator.

`systems/` has a file for each; `compare` prices them, `table` writes down what was found.
"""

from dflop.comparison.compare import OURS, SystemRow, compare_systems
from dflop.comparison.systems import SYSTEMS
from dflop.comparison.table import comparison_frame, comparison_json, comparison_text

__all__ = [
    "OURS",
    "SYSTEMS",
    "SystemRow",
    "compare_systems",
    "comparison_frame",
    "comparison_json",
    "comparison_text",
]
