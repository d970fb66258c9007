"""Training: topology, the trainer, checkpoints, observations.

What is named here needs no torch; the ranks themselves run `dflop.training.worker`.
"""

from dflop.training.launch import check_devices, is_first_node, launch_ranks, summarise, threads_per_rank
from dflop.training.observations import merge_observations

__all__ = ["check_devices", "is_first_node", "launch_ranks", "merge_observations", "summarise", "threads_per_rank"]
