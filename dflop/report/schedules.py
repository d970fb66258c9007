"""Predicted times of schedules for the report: those of the preview's batches, and one step's timeline.

The preview is priced as it was written, without scheduling again. `random` is priced on the same global batches.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from dflop.base import UserError
from dflop.schedule import Assignment, BatchScheduler, StepSchedule, rank_columns
from dflop.shapes import SampleShapes
from dflop.step import StageTimes, Timeline

__all__ = ["PreviewPrices", "price_preview", "replay"]

_MOST_BATCHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewPrices:
    """Predicted means over the preview's batches, and the memory of the fullest device in any of them."""

    num_batches: int
    step_s: float
    idle: float
    random_step_s: float
    random_idle: float
    lower_bound_s: float
    memory_bytes: float


def price_preview(scheduler: BatchScheduler, preview: pl.DataFrame, path: Path) -> PreviewPrices:
    """Price the first batches of `schedule.parquet` (read from `path`) and the same batches under `random`.

    Raises:
        UserError: when the preview names a sample that is not in `shapes.duckdb`.
    """
    steps = preview["step"].unique().sort().to_list()[:_MOST_BATCHES]
    known = pl.DataFrame({"sample_id": scheduler.samples.sample_id.tolist()}).with_row_index("place")
    preview = preview.filter(pl.col("step").is_in(steps)).join(known, on="sample_id", how="left", maintain_order="left")
    strangers = preview.filter(pl.col("place").is_null())
    if len(strangers):
        raise UserError(
            f"{path} schedules sample {strangers['sample_id'][0]!r}, which is not in shapes.duckdb; "
            "make it again with `dflop schedule`"
        )
    scheduled, randoms, bounds, held_bytes = [], [], [], []
    for step in steps:
        rows, shapes = _shapes_of(scheduler, preview.filter(pl.col("step") == step))
        cells = rows["llm_dp_rank"].to_numpy(), rows["microbatch"].to_numpy()
        names = rank_columns(shapes.encoders)
        if set(names) <= set(rows.columns):
            assignment = Assignment(
                llm_dp_rank=cells[0], microbatch=cells[1], encoder_rank=rows.select(names).to_numpy()
            )
            # The table does not hold the encoders' slots. Those computed here are about as good as the schedule's.
            assignment = scheduler.pricer.filled(shapes, assignment)
        else:
            assignment = scheduler.pricer.assign(shapes, *cells)
        times = scheduler.pricer.stage_times(shapes, assignment)
        scheduled.append(scheduler.pricer.timeline(times, assignment.slots))
        held_bytes.append(max(scheduler.pricer.memory_bytes(shapes, assignment).values()))
        bounds.append(scheduler.pricer.lower_bound_s(shapes))
        randoms.append(scheduler.at_random(step))
    return PreviewPrices(
        num_batches=len(steps),
        step_s=statistics.fmean(timeline.step_s for timeline in scheduled),
        idle=statistics.fmean(timeline.idle for timeline in scheduled),
        random_step_s=statistics.fmean(schedule.step_s for schedule in randoms),
        random_idle=statistics.fmean(schedule.idle for schedule in randoms),
        lower_bound_s=statistics.fmean(bounds),
        memory_bytes=max(held_bytes),
    )


def _shapes_of(scheduler: BatchScheduler, rows: pl.DataFrame) -> tuple[pl.DataFrame, SampleShapes]:
    """The rows of a step and their shapes, in the same order: those of a shared sample's shares one after the other."""
    divider = scheduler.pricer.divider
    if divider is None or "degree" not in rows.columns:
        return rows, scheduler.samples.take(rows["place"].to_numpy())
    first = pl.col("llm_dp_rank") - pl.col("share")
    # A sample that was drawn twice may have gone to the same replicas twice.
    copy = pl.int_range(pl.len()).over("place", first, "microbatch", "degree", "share")
    rows = rows.sort("place", first, "microbatch", "degree", copy, "share")
    samples = rows.filter(share=0)
    shapes = scheduler.samples.take(samples["place"].to_numpy())
    return rows, divider.divided(shapes, samples["degree"].to_numpy())


def replay(scheduler: BatchScheduler, schedule: StepSchedule) -> tuple[StageTimes, Timeline]:
    """The stage times, and every start and end, of a step that was scheduled, priced by the scheduler's costs."""
    times = scheduler.pricer.stage_times(schedule.shapes, schedule.assignment)
    return times, scheduler.pricer.timeline(times, schedule.slots)
