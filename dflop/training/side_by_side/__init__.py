"""Ways to train beside each other, on the clock: rows of a comparison take turns, step by step, on the same devices.

`dflop compare --measure` starts the ranks here. Every rank builds all rows: what a plan and its schedules say, in the
runtime of training (`planned`), and what a user would write herself (`plain`). They train the same global batches, one
after the other in each step (`sides`), so that whatever else a machine is busy with meets all of them alike. `launch`
starts it, `rank` is what each rank runs. What is named here needs no torch.
"""

from dflop.training.side_by_side.launch import PLAIN_ROWS, counted_steps, measure_rows, num_scheduled

__all__ = ["PLAIN_ROWS", "counted_steps", "measure_rows", "num_scheduled"]
