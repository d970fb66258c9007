"""Regroups one global batch into microbatches so that no pipeline stage waits."""

from dflop.scheduling.ilp import CbcProcess, IlpResult, ilp_buckets
from dflop.scheduling.policies import descend, lpt_buckets, random_buckets
from dflop.scheduling.problem import BatchProblem, bucket_loads, check_assignment, lower_bound_s

__all__ = [
    "BatchProblem",
    "CbcProcess",
    "IlpResult",
    "bucket_loads",
    "check_assignment",
    "descend",
    "ilp_buckets",
    "lower_bound_s",
    "lpt_buckets",
    "random_buckets",
]
