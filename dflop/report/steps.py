"""One step in three panels of the same global batch: as scheduled, with random microbatches, and as measured.

The scheduled step is one that training carried out, if it kept the schedule; otherwise the batch is scheduled again.
Both predictions are priced by the cost table alone, without corrections, so that they can be compared.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from dflop.base import UserError
from dflop.report.boxes import StepPanel, measured_boxes, predicted_boxes
from dflop.report.run import TrainedRun
from dflop.report.schedules import replay
from dflop.report.style import format_seconds
from dflop.schedule import BatchScheduler, StepSchedule
from dflop.step import Node

__all__ = ["StepShown", "show_step"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepShown:
    """A step and its panels. `finding` says in a sentence what they show, and `figures` in numbers. `schedule` is that
    of the first panel."""

    step: int
    schedule: StepSchedule
    panels: list[StepPanel]
    figures: dict[str, Any]
    finding: str


def show_step(scheduler: BatchScheduler, policy: str, trained: TrainedRun | None) -> StepShown:
    """A step from the middle of the training, or the first step if `trained` is None.

    `trained` must have been done with the scheduler's plan and costs.

    Raises:
        UserError: when observations and metrics of the training have no step in common.
    """
    kept = trained.schedule if trained and _is_observed(trained, trained.schedule) else None
    step = kept.step if kept else _middle_step(trained) if trained else 0
    ours = kept or scheduler.schedule_what_fits(step)
    other = scheduler.at_random(step, ours.num_left_out)
    replayed = replay(scheduler, ours), replay(scheduler, other)
    (_, by_policy), (_, at_random) = replayed
    faster = at_random.step_s / by_policy.step_s
    policy = ours.policy if kept else policy
    times_as_long = f"{faster:.2f}x as long" + ", in more memory than there is" * bool(other.num_beyond_memory)
    titles = (
        f"{policy}, predicted: {format_seconds(by_policy.step_s)}, idle {by_policy.idle:.0%}",
        f"random, predicted: {format_seconds(at_random.step_s)}, idle {at_random.idle:.0%}, {times_as_long}",
    )
    panels = [
        StepPanel(title, predicted_boxes(scheduler.pricer.plan, timeline), timeline.step_s, schedule)
        for title, schedule, (_, timeline) in zip(titles, (ours, other), replayed, strict=True)
    ]
    figures = {
        "step": step,
        f"predicted_s_{policy}": by_policy.step_s,
        "predicted_s_random": at_random.step_s,
        "lower_bound_s": ours.lower_bound_s,
    }
    finding = f"Step {step}: {policy} is predicted {_faster(faster)} than random on the same samples"
    if trained:
        panel, measured = _measured(scheduler, trained, ours, is_kept=kept is not None, policy=policy)
        panels.append(panel)
        figures |= measured
        finding += f"; measured, the step took {measured['measured_over_predicted']:.2f}x its prediction"
    return StepShown(step=step, schedule=ours, panels=panels, figures=figures, finding=finding)


def _is_observed(trained: TrainedRun, schedule: StepSchedule | None) -> bool:
    """Whether there are measurements of a schedule's step. A resumed run may have gone back to before that step."""
    return schedule is not None and all(
        schedule.step in table["step"] for table in (trained.observations, trained.metrics)
    )


def _middle_step(trained: TrainedRun) -> int:
    """The step in the middle of those that were observed after the warm-up."""
    observed = trained.observations
    if "warmup" in observed.columns and not observed["warmup"].all():
        observed = observed.filter(~pl.col("warmup"))
    steps = sorted(set(observed["step"]) & set(trained.metrics["step"]))
    if not steps:
        raise UserError("train/observations.duckdb and train/metrics.jsonl share no step; run `dflop train` again")
    return steps[len(steps) // 2]


def _measured(
    scheduler: BatchScheduler, trained: TrainedRun, ours: StepSchedule, *, is_kept: bool, policy: str
) -> tuple[StepPanel, dict[str, float]]:
    """The panel of the step as measured, and its figures."""
    observed = trained.observations.filter(pl.col("step") == ours.step)
    line = trained.metrics.filter(pl.col("step") == ours.step).row(0, named=True)
    is_same = is_kept or _is_trained_as(observed, scheduler.pricer.nodes, ours.forward_s, ours.backward_s)
    slower = line["pipeline_s"] / line["predicted_step_s"]
    title = (
        f"{line.get('policy', policy)}, measured: {format_seconds(line['pipeline_s'])}, "
        f"idle {line['idle']:.0%}, {slower:.2f}x its prediction"
        + ("" if is_same else f" of {format_seconds(line['predicted_step_s'])} (not the assignment drawn above)")
    )
    if is_kept and ours.corrections_version:
        title += f" of {format_seconds(line['predicted_step_s'])}, made with what had been learned of the costs"
    boxes = measured_boxes(scheduler.pricer.plan, observed)
    # `pipeline_s` is the first rank's. A rank that began later may end later by its own clock.
    ended_s = max(line["pipeline_s"], boxes["end_s"].max() or 0.0)
    panel = StepPanel(title, boxes, ended_s, ours if is_same else None)
    return panel, {"measured_s": line["pipeline_s"], "measured_over_predicted": slower}


def _faster(ratio: float) -> str:
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def _is_trained_as(
    observed: pl.DataFrame, nodes: tuple[Node, ...], forward_s: np.ndarray, backward_s: np.ndarray
) -> bool:
    """Whether these times are the trainer's predictions. After a time limit or a correction, its schedule may have been
    another."""
    place = {(node.module, node.pp_stage, node.dp_rank): index for index, node in enumerate(nodes)}
    computed = observed.filter(pl.col("predicted_s").is_not_null())
    times = {"forward": forward_s, "backward": backward_s}
    return all(
        np.isclose(
            row["predicted_s"],
            times[row["pass"]][place[row["module"], row["pp_stage"], row["dp_rank"]], row["microbatch"]],
            rtol=1e-3,
        )
        for row in computed.iter_rows(named=True)
    )
