"""Training: topology, the trainer, checkpoints, observations.

Importing this package does not import torch. The ranks themselves run `dflop.train.rank`.
"""

from dflop.train.bottleneck import rank_names
from dflop.train.generation import generation_of
from dflop.train.launch import check_devices, check_plan, check_resumable, finished_at, launch_ranks
from dflop.train.observations import NUM_WARMUP_STEPS, kept_schedule, merge_observations
from dflop.train.sole_use import sole_use
from dflop.train.summary import summarise
from dflop.train.trackers import check_trackers

__all__ = [
    "NUM_WARMUP_STEPS",
    "check_devices",
    "check_plan",
    "check_resumable",
    "check_trackers",
    "finished_at",
    "generation_of",
    "kept_schedule",
    "launch_ranks",
    "merge_observations",
    "rank_names",
    "sole_use",
    "summarise",
]
