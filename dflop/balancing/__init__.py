"""Which sample goes where, by costs alone: nothing here knows plans, files or devices.

`problem` states the question, `policies`, `ilp` and `replicas` answer it. `sampler` offers the answers to other
people's training loops; it needs torch, and is imported where it is asked for.
"""

from dflop.balancing.ilp import WORK_TIMEOUT_S, CbcProcess, IlpResult, without_cbc
from dflop.balancing.policies import (
    NO_CAP,
    dealt_at_random,
    descend,
    lpt_buckets,
    quick_buckets,
    random_buckets,
    small_at_both_ends,
)
from dflop.balancing.problem import BatchProblem, bucket_loads, check_assignment, goal_s, least_bucket_s
from dflop.balancing.replicas import balanced_cells

__all__ = [
    "NO_CAP",
    "WORK_TIMEOUT_S",
    "BatchProblem",
    "CbcProcess",
    "IlpResult",
    "balanced_cells",
    "bucket_loads",
    "check_assignment",
    "dealt_at_random",
    "descend",
    "goal_s",
    "least_bucket_s",
    "lpt_buckets",
    "quick_buckets",
    "random_buckets",
    "small_at_both_ends",
    "without_cbc",
]
