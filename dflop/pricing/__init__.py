"""The costs of an assignment of samples in a plan: stage times, transfers, memory, and corrections learned from runs.

Planning and scheduling both use it. Files: `assignment` (which replica computes what), `stage_costs` (computations),
`transfers`, `memory` and `device_memory` (bytes on devices), `batch_problem` (the balancing problem of a batch),
`pricer` (a whole step), `memory_limit` (what fits), `sharing` (replicas that wait for each other in every layer),
`correction` (measured against predicted times).
"""

from dflop.pricing.assignment import Assignment, Cells, deal_items, starts_anew_in_microbatches, sums_by_cell
from dflop.pricing.batch_problem import seconds_of_columns
from dflop.pricing.correction import NO_CORRECTIONS, Corrections, Learner, bin_of, is_stale, stale_share
from dflop.pricing.correction_file import CorrectionFile, prices_digest, read_learned
from dflop.pricing.device_memory import MEMORY_CATEGORIES, tensor_bytes
from dflop.pricing.memory_limit import (
    MOST_LEFT_OUT,
    alone_bytes,
    describe_left_out,
    fits,
    fitted,
    leave_out_too_large,
    without,
)
from dflop.pricing.pricer import BYTES_PER_VALUE, WEIGHT_SHARE, Pricer
from dflop.pricing.sharing import lasting_s
from dflop.pricing.stage_costs import loads_of
from dflop.pricing.transfers import find_link

__all__ = [
    "BYTES_PER_VALUE",
    "MEMORY_CATEGORIES",
    "MOST_LEFT_OUT",
    "NO_CORRECTIONS",
    "WEIGHT_SHARE",
    "Assignment",
    "Cells",
    "CorrectionFile",
    "Corrections",
    "Learner",
    "Pricer",
    "alone_bytes",
    "bin_of",
    "deal_items",
    "describe_left_out",
    "find_link",
    "fits",
    "fitted",
    "is_stale",
    "lasting_s",
    "leave_out_too_large",
    "loads_of",
    "prices_digest",
    "read_learned",
    "seconds_of_columns",
    "stale_share",
    "starts_anew_in_microbatches",
    "sums_by_cell",
    "tensor_bytes",
    "without",
]
