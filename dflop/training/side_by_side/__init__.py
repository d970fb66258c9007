"""Measured comparison of ways to train: the rows of a comparison take turns, step by step, on the same devices.

`dflop compare --measure` starts the ranks here. Every rank builds all rows: plans with their schedules, in the runtime
of training (`planned`), and what a user would write herself (`plain`). They train the same global batches, one after
the other in each step (`sides`), so that other load on the machine affects all of them alike. `launch` starts the
ranks, and `rank` is the program of each rank. Importing this package does not import torch.
"""

from dflop.training.side_by_side.launch import PLAIN_ROWS, counted_steps, measure_rows, num_scheduled

__all__ = ["PLAIN_ROWS", "counted_steps", "measure_rows", "num_scheduled"]
