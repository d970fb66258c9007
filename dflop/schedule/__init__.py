"""Which sample goes where in a plan: what an assignment costs, and one global batch regrouped so that no stage waits.

Prices: `pricer` (a whole step) from `stage_costs` (computations), `transfers`, `plan_memory` and `memory_by_category`
(bytes on devices), for an `assignment` of samples; `memory_limit` says what fits, `correction` what measured times
teach.
Schedules: `scheduler` decides a step, `service` does so in a process beside training, `preview` shows the first steps.
"""

from dflop.schedule.assignment import (
    Assignment,
    Cells,
    cells_in,
    deal_items,
    dealing_of,
    module_alone,
    starts_anew_in_microbatches,
    sums_by_cell,
)
from dflop.schedule.batch_problem import loads_without_plan
from dflop.schedule.correction import NO_CORRECTIONS, Corrections, Learner, bin_of, is_stale, stale_share
from dflop.schedule.correction_file import CorrectionFile, prices_digest, read_learned
from dflop.schedule.correction_loop import REPORT_LAG_STEPS, CorrectionLoop, MeasuredStep
from dflop.schedule.global_batches import GlobalBatches, steps_in_epochs
from dflop.schedule.lockstep import lasting_s
from dflop.schedule.memory_by_category import MEMORY_CATEGORIES, tensor_bytes
from dflop.schedule.memory_limit import (
    MOST_LEFT_OUT,
    alone_bytes,
    describe_left_out,
    fits,
    fitted,
    leave_out_too_large,
    shared_bytes,
    without,
)
from dflop.schedule.preview import preview_frames, rank_columns
from dflop.schedule.pricer import BYTES_PER_VALUE, Pricer
from dflop.schedule.scheduler import BatchScheduler
from dflop.schedule.stage_costs import loads_of
from dflop.schedule.step_schedule import StepSchedule, schedule_of
from dflop.schedule.step_search import StepSearch
from dflop.schedule.transfers import find_link, to_host_bytes_per_s

__all__ = [
    "BYTES_PER_VALUE",
    "MEMORY_CATEGORIES",
    "MOST_LEFT_OUT",
    "NO_CORRECTIONS",
    "REPORT_LAG_STEPS",
    "Assignment",
    "BatchScheduler",
    "Cells",
    "CorrectionFile",
    "CorrectionLoop",
    "Corrections",
    "GlobalBatches",
    "Learner",
    "MeasuredStep",
    "Pricer",
    "StepSchedule",
    "StepSearch",
    "alone_bytes",
    "bin_of",
    "cells_in",
    "deal_items",
    "dealing_of",
    "describe_left_out",
    "find_link",
    "fits",
    "fitted",
    "is_stale",
    "lasting_s",
    "leave_out_too_large",
    "loads_of",
    "loads_without_plan",
    "module_alone",
    "preview_frames",
    "prices_digest",
    "rank_columns",
    "read_learned",
    "schedule_of",
    "shared_bytes",
    "stale_share",
    "starts_anew_in_microbatches",
    "steps_in_epochs",
    "sums_by_cell",
    "tensor_bytes",
    "to_host_bytes_per_s",
    "without",
]
