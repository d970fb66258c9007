"""One global batch regrouped into microbatches so that no pipeline stage waits.

`scheduler` decides a step, `service` does so in a process beside training, `preview` shows the first steps.
"""

from dflop.scheduling.correction_loop import REPORT_LAG_STEPS, CorrectionLoop, MeasuredStep
from dflop.scheduling.global_batches import GlobalBatches, steps_in_epochs
from dflop.scheduling.preview import preview_frames, rank_columns
from dflop.scheduling.scheduler import BatchScheduler
from dflop.scheduling.step_schedule import StepSchedule, schedule_of
from dflop.scheduling.step_search import StepSearch

__all__ = [
    "REPORT_LAG_STEPS",
    "BatchScheduler",
    "CorrectionLoop",
    "GlobalBatches",
    "MeasuredStep",
    "StepSchedule",
    "StepSearch",
    "preview_frames",
    "rank_columns",
    "schedule_of",
    "steps_in_epochs",
]
