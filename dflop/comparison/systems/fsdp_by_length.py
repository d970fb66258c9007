"""Fully sharded data parallelism, with samples of like length in a microbatch.

This is `group_by_length` of the Hugging Face Trainer, but within a global batch, so that each step trains on the same
samples as with the other systems.
"""

from dflop.balance import BY_LENGTH
from dflop.comparison.system import System, fastest_of
from dflop.comparison.systems.fsdp_random import whole_on_every_device

__all__ = ["SYSTEM"]


SYSTEM = System(
    name="FSDP, length-grouped",
    baseline="every device the whole model, length-grouped batches (FSDP-style)",
    plans=fastest_of(whole_on_every_device, policy=BY_LENGTH),
    policy=BY_LENGTH,
    moves_samples=False,
)
