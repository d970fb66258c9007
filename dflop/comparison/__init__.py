"""Comparison of published training systems with ours, on the same batches, costs and cluster, by one simulator.

`systems/` has a file for each system; `compare` prices them, `table` writes the results, and `baselines` prices the
usual ones for `dflop plan`. `pins` checks early what the config pins. `ablation` compares parts of our system,
`scaling` repeats the comparison at several sizes of the cluster. `emitted_plan` prices what other trainers make of our
plan. On the clock they are compared by `checks/side_by_side`.
"""

from dflop.comparison.ablation import ABLATION
from dflop.comparison.baselines import price_baselines
from dflop.comparison.compare import OURS, SystemRow, compare_systems
from dflop.comparison.emitted_plan import EmittedPlans
from dflop.comparison.pins import check_pins
from dflop.comparison.scaling import keys_of_size, scaling_frame, scaling_text
from dflop.comparison.systems import SYSTEMS, TODAYS, systems_of
from dflop.comparison.systems.today import todays_layout_note
from dflop.comparison.table import comparison_frame, comparison_json, comparison_text

__all__ = [
    "ABLATION",
    "OURS",
    "SYSTEMS",
    "TODAYS",
    "EmittedPlans",
    "SystemRow",
    "check_pins",
    "compare_systems",
    "comparison_frame",
    "comparison_json",
    "comparison_text",
    "keys_of_size",
    "price_baselines",
    "scaling_frame",
    "scaling_text",
    "systems_of",
    "todays_layout_note",
]
