"""The page's section on savings: step time, idle, device-hours and money beside what others would run.

What others would take is never measured here: it is the ratio of two predictions, made by one simulator on the same
global batches. Beside each ratio stands how far single batches are apart in it. Where the run was trained, its own
seconds are measured, and a saving is a measured time multiplied by a predicted ratio: a prediction, and marked so.
"""

import re
from dataclasses import dataclass
from typing import Any

from dflop.config import ClusterConfig
from dflop.planning import TODAY
from dflop.reporting.run import Run, TrainedRun
from dflop.reporting.schedules import PreviewPrices

__all__ = ["SavingsSection", "savings_section"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    """One way to train without this plan; `why_not` where it cannot be. `ratio` is its step over ours, `least` and
    `most` that of single batches."""

    name: str
    plan: str = ""
    step_s: float = 0.0
    ratio: float = 0.0
    least: float | None = None
    most: float | None = None
    idle: float = 0.0
    why_not: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingsSection:
    """`horizon` says in words what the hours are of, `hours` our own there, `hours_are` measured or predicted."""

    finding: str
    others: tuple[Other, ...]
    step_s: float
    measured_step_s: float | None
    idle: float | None
    measured_idle: float | None
    num_batches: int
    hours: float
    hours_are: str
    horizon: str
    hour: str
    cost_of_hour: float | None
    regrouping: PreviewPrices | None
    costs_source: str


def savings_section(
    run: Run,
    trained: TrainedRun | None,
    preview: PreviewPrices | None,
    cluster: ClusterConfig,
    *,
    num_samples: int,
    batch_size: int,
) -> SavingsSection | None:
    """None for a plan that was written by hand, which has nothing beside it."""
    predicted = run.plan_text.get("predicted")
    if not predicted or not run.plan_text.get("baselines"):
        return None
    step_s, num_devices = predicted["step_s"], run.plan.world_size
    if trained:
        hours, hours_are = trained.summary.get("train_s", 0.0) * num_devices / 3600, "measured"
        horizon = f"this run's {len(trained.metrics):,} steps"
    else:
        num_steps = max(1, num_samples // batch_size)
        hours, hours_are = num_steps * step_s * num_devices / 3600, "predicted"
        horizon = f"an epoch of {num_samples:,} samples, {num_steps:,} steps"
    others = tuple(_other(said, step_s) for said in run.plan_text["baselines"])
    hour = "device-hour" if not cluster.hides_transfers else "GPU-hour"
    return SavingsSection(
        finding=_finding(others, run.costs_source),
        others=others,
        step_s=step_s,
        measured_step_s=trained.summary.get("step_s") if trained else None,
        idle=predicted.get("idle"),
        measured_idle=trained.summary.get("idle") if trained else None,
        num_batches=predicted.get("num_batches", 0),
        hours=hours,
        hours_are=hours_are,
        horizon=horizon,
        hour=hour,
        cost_of_hour=cluster.gpu_hour_cost,
        regrouping=preview,
        costs_source=run.costs_source,
    )


def _other(said: dict[str, Any], step_s: float) -> Other:
    if "step_s" not in said:
        return Other(name=said["name"], why_not=said["why_not"])
    ratio = said["step_s"] / step_s
    least, most = said.get("over_batches") or (None, None)
    return Other(
        name=said["name"],
        plan=said["plan"],
        step_s=said["step_s"],
        ratio=ratio,
        least=least,
        most=most,
        idle=said["idle"],
    )


def _finding(others: tuple[Other, ...], source: str) -> str:
    able = sorted((own for own in others if own.why_not is None), key=lambda own: own.ratio)
    if not able:
        return "Nothing that others would run fits into memory"
    nearest, furthest = able[0], able[-1]
    of_costs = "" if source == "measured" else f" (from {source} costs)"
    for own in able:
        if own.name == TODAY:
            finding = f"Predicted{of_costs}: today's layout would take {own.ratio:.2f}x as long as this plan"
            if nearest.ratio >= 1 or own.ratio == nearest.ratio:
                return f"{finding}, so less" if own.ratio < 1 else finding
            return f"{finding}, and {_short(nearest)} {nearest.ratio:.2f}x, so less"
    if nearest.ratio < 1:
        return f"Predicted{of_costs}: {_short(nearest)} would take {nearest.ratio:.2f}x as long as this plan, so less"
    finding = f"Predicted{of_costs}: without this plan a step takes {nearest.ratio:.2f}x as long ({_short(nearest)})"
    if furthest is not nearest:
        finding += f" to {furthest.ratio:.2f}x ({_short(furthest)})"
    return finding


def _short(other: Other) -> str:
    """Without what kind of training it stands for."""
    return re.sub(r" \([^)]*-style\)$", "", other.name)
