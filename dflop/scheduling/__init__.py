"""Scheduling: one global batch regrouped into microbatches so that no pipeline stage waits.

`problem` states the question, `policies` and `ilp` answer it, `pricing` says what an answer costs,
`scheduler` picks, `service` does so beside training. `sampler` stands apart: for other people's training loops, which
need neither databases nor solvers. Names are therefore fetched when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.scheduling.batches import GlobalBatches
    from dflop.scheduling.correction import Corrections, Learner, is_stale, stale_share
    from dflop.scheduling.correction_file import CorrectionFile, read_learned
    from dflop.scheduling.correction_loop import REPORT_LAG_STEPS, CorrectionLoop, MeasuredStep
    from dflop.scheduling.fitting import MOST_LEFT_OUT, alone_bytes, describe_left_out, leave_out_too_large, without
    from dflop.scheduling.ilp import CbcProcess, IlpResult, ilp_buckets, without_cbc
    from dflop.scheduling.policies import (
        dealt_at_random,
        descend,
        lpt_buckets,
        quick_buckets,
        random_buckets,
        small_at_both_ends,
    )
    from dflop.scheduling.preview import preview_frames
    from dflop.scheduling.pricing import BYTES_PER_VALUE, WEIGHT_SHARE, Assignment, Pricer
    from dflop.scheduling.problem import BatchProblem, bucket_loads, check_assignment, goal_s, lower_bound_s
    from dflop.scheduling.sampler import BalancedBatchSampler
    from dflop.scheduling.scheduler import BatchScheduler, StepSchedule
    from dflop.scheduling.stage_costs import loads_of, only
    from dflop.scheduling.step_search import StepSearch
    from dflop.scheduling.transfers import find_link

_HOMES = {
    "batches": ("GlobalBatches",),
    "fitting": ("MOST_LEFT_OUT", "alone_bytes", "describe_left_out", "leave_out_too_large", "without"),
    "correction": ("Corrections", "Learner", "is_stale", "stale_share"),
    "correction_file": ("CorrectionFile", "read_learned"),
    "correction_loop": ("REPORT_LAG_STEPS", "CorrectionLoop", "MeasuredStep"),
    "ilp": ("CbcProcess", "IlpResult", "ilp_buckets", "without_cbc"),
    "policies": (
        "dealt_at_random",
        "descend",
        "lpt_buckets",
        "quick_buckets",
        "random_buckets",
        "small_at_both_ends",
    ),
    "preview": ("preview_frames",),
    "pricing": ("BYTES_PER_VALUE", "WEIGHT_SHARE", "Assignment", "Pricer"),
    "problem": ("BatchProblem", "bucket_loads", "check_assignment", "goal_s", "lower_bound_s"),
    "sampler": ("BalancedBatchSampler",),
    "stage_costs": ("loads_of", "only"),
    "step_search": ("StepSearch",),
    "transfers": ("find_link",),
    "scheduler": ("BatchScheduler", "StepSchedule"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BYTES_PER_VALUE",
    "MOST_LEFT_OUT",
    "REPORT_LAG_STEPS",
    "WEIGHT_SHARE",
    "Assignment",
    "BalancedBatchSampler",
    "BatchProblem",
    "BatchScheduler",
    "CbcProcess",
    "CorrectionFile",
    "CorrectionLoop",
    "Corrections",
    "GlobalBatches",
    "IlpResult",
    "Learner",
    "MeasuredStep",
    "Pricer",
    "StepSchedule",
    "StepSearch",
    "alone_bytes",
    "bucket_loads",
    "check_assignment",
    "dealt_at_random",
    "descend",
    "describe_left_out",
    "find_link",
    "goal_s",
    "ilp_buckets",
    "is_stale",
    "leave_out_too_large",
    "loads_of",
    "lower_bound_s",
    "lpt_buckets",
    "only",
    "preview_frames",
    "quick_buckets",
    "random_buckets",
    "read_learned",
    "small_at_both_ends",
    "stale_share",
    "without",
    "without_cbc",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
