"""Training: topology, the trainer, checkpoints, observations.

What is named here needs no torch; the ranks themselves run `dflop.training.rank`.
"""

from dflop.training.launch import check_devices, check_plan, launch_ranks, summarise
from dflop.training.observations import NUM_WARMUP_STEPS, merge_observations

__all__ = ["NUM_WARMUP_STEPS", "check_devices", "check_plan", "launch_ranks", "merge_observations", "summarise"]
