"""The emulated cluster: the real runtime on one machine, where stages sleep as long as they are predicted to compute.

`dflop train --emulate costs.duckdb` starts as many processes as the plan has ranks. They carry out the instruction
lists of training over gloo, with the same schedules from the same service, the same messages, hand-overs and gradient
syncs; only tensors have one number a token or item, and nothing is loaded, computed or saved. What a simulation leaves
out is then in the step: the order as it is carried out, waiting, deciding ahead, and what the program itself takes.

`launch` checks, starts the ranks and writes the results, `rank` is what each of them runs, `work` what a stage does.
What is named here needs no torch.
"""

from dflop.training.emulation.launch import emulate, emulation_text, is_emulated

__all__ = ["emulate", "emulation_text", "is_emulated"]
