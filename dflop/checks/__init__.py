"""Checks: is a plan's training right, and what does it take on the clock? A training run uses none of them.

- `model_arithmetic`: do a plan's stages compute what transformers computes? (`dflop check-model`); `one_process` runs
  both
- `of_plan`: does a rank hold the bytes that were predicted, and do all messages end? (`dflop check-plan`)
- `emulation`: does a step take the time that was predicted, on a machine without the devices? (`dflop train --emulate`)
- `side_by_side`: how long do the steps of other systems take on the same devices? (`dflop compare --measure`)
- `verdict`: what does the log of another trainer's run tell? (`dflop verdict`); `step_logs`, with
  `log_files` and `log_formats`, reads it
- `machine`: what is this machine, and what does it lack? (`dflop doctor`)

A new check of a plan is one file in `of_plan`; one of another kind also needs a command in `cli/`. Importing this
package, `emulation`, `machine` or `side_by_side` does not import torch.
"""
