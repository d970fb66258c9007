"""Assigning samples to buckets by their costs alone: nothing here knows plans, files or devices.

`problem` states the problem; `packing`, `ilp` and `replicas` solve it, and `policies` are the ways to group that have a
name. `sampler` makes the solutions usable in other people's training loops. It needs torch, so it is only imported on
demand.
"""

from dflop.balance.ilp import WORK_TIMEOUT_S, CbcProcess, IlpResult, without_cbc
from dflop.balance.packing import (
    dealt_at_random,
    descend,
    lpt_buckets,
    quick_buckets,
    random_buckets,
    small_at_both_ends,
)
from dflop.balance.policies import BY_LENGTH, LPT, POLICIES, RANDOM, DrawnBatch, Policy, drawn_in_turns
from dflop.balance.problem import BatchProblem, bucket_loads, check_assignment, goal_s, least_bucket_s
from dflop.balance.replicas import balanced_cells

__all__ = [
    "BY_LENGTH",
    "LPT",
    "POLICIES",
    "RANDOM",
    "WORK_TIMEOUT_S",
    "BatchProblem",
    "CbcProcess",
    "DrawnBatch",
    "IlpResult",
    "Policy",
    "balanced_cells",
    "bucket_loads",
    "check_assignment",
    "dealt_at_random",
    "descend",
    "drawn_in_turns",
    "goal_s",
    "least_bucket_s",
    "lpt_buckets",
    "quick_buckets",
    "random_buckets",
    "small_at_both_ends",
    "without_cbc",
]
