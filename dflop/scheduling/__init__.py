"""Scheduling: one global batch regrouped into microbatches so that no pipeline stage waits.

`problem` states the question, `policies` and `ilp` answer it, `pricing` says what an answer costs,
`scheduler` picks, `service` does so beside training.
"""

from dflop.scheduling.batches import GlobalBatches
from dflop.scheduling.ilp import CbcProcess, IlpResult, ilp_buckets
from dflop.scheduling.policies import descend, lpt_buckets, random_buckets
from dflop.scheduling.preview import preview_frames
from dflop.scheduling.pricing import Assignment, Pricer
from dflop.scheduling.problem import BatchProblem, bucket_loads, check_assignment, goal_s, lower_bound_s
from dflop.scheduling.scheduler import BatchScheduler, StepSchedule

__all__ = [
    "Assignment",
    "BatchProblem",
    "BatchScheduler",
    "CbcProcess",
    "GlobalBatches",
    "IlpResult",
    "Pricer",
    "StepSchedule",
    "bucket_loads",
    "check_assignment",
    "descend",
    "goal_s",
    "ilp_buckets",
    "lower_bound_s",
    "lpt_buckets",
    "preview_frames",
    "random_buckets",
]
