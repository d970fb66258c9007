"""The emulated cluster: the real runtime on one machine, where stages sleep as long as they are predicted to compute.

`dflop train --emulate costs.duckdb` starts as many processes as the plan has ranks. They carry out the instruction
lists of training over gloo, with the same schedules from the same service, the same messages and gradient syncs. But
tensors have only one number a token or item, and nothing is loaded, computed or saved. So a step includes what a
simulation leaves out: the real order of messages, waiting, scheduling ahead, and the overhead of the program itself.

`launch` checks, starts the ranks and writes the results; `rank` is the program of each rank; `work` is what a stage
does. Importing this package does not import torch.
"""

from dflop.checks.emulation.launch import emulate, emulation_text

__all__ = ["emulate", "emulation_text"]
