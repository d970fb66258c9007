"""Measured comparison of ways to train: the rows of a comparison take turns, step by step, on the same devices.

`dflop compare --measure` starts the ranks here. Every rank builds all rows: plans with their schedules, in the runtime
of training (`planned`), and what a user would write herself (`plain`). They train the same global batches, one after
the other in each step (`sides`), so that other load on the machine affects all of them alike. `contenders` finds the
plans and schedules of the rows, `launch` starts the ranks, `rank` is the program of each rank, and `measured` writes
the table. Importing this package does not import torch.
"""

from dflop.checks.side_by_side.contenders import OURS_AT_RANDOM, Contender, contenders
from dflop.checks.side_by_side.launch import PLAIN_ROWS, counted_steps, measure_rows, num_scheduled
from dflop.checks.side_by_side.measured import Clocked, measured_frame, measured_text

__all__ = [
    "OURS_AT_RANDOM",
    "PLAIN_ROWS",
    "Clocked",
    "Contender",
    "contenders",
    "counted_steps",
    "measure_rows",
    "measured_frame",
    "measured_text",
    "num_scheduled",
]
