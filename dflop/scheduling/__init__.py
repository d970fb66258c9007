"""Regroups one global batch into microbatches so that no pipeline stage waits."""

from dflop.scheduling.policies import descend, lpt_buckets, random_buckets
from dflop.scheduling.problem import BatchProblem, bucket_loads, check_assignment, lower_bound_s

__all__ = [
    "BatchProblem",
    "bucket_loads",
    "check_assignment",
    "descend",
    "lower_bound_s",
    "lpt_buckets",
    "random_buckets",
]
