"""The page's section on savings: step time, idle, device-hours and money, compared with the baselines.

The times of baselines are never measured here. They are ratios of two predictions, made by one simulator on the same
global batches. Each ratio is shown with its range over single batches. If the run was trained, its own time is
measured; a saving is then a measured time multiplied by a predicted ratio, and is marked as predicted.
"""

import re
from dataclasses import dataclass
from typing import Any

from dflop.config import ClusterConfig
from dflop.report.run import Run, TrainedRun
from dflop.search import TODAY, Epoch, hour_of

__all__ = ["SavingsSection", "savings_section"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    """A baseline: one way to train without this plan. `why_not` says why it is impossible, if it is. `ratio` is its
    step time over ours; `least` and `most` are the range of that ratio over single batches."""

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
    """The section. `hours` are this plan's device-hours over the `horizon`, which is described in words; `hours_are` is
    `measured` or `predicted`."""

    finding: str
    others: tuple[Other, ...]
    hours: float
    hours_are: str
    horizon: str
    hour: str


def savings_section(
    run: Run,
    trained: TrainedRun | None,
    cluster: ClusterConfig,
    *,
    num_samples: float,
    batch_size: int,
) -> SavingsSection | None:
    """The section; None for a plan that was written by hand, which has no baselines."""
    predicted = run.plan_text.get("predicted")
    if not predicted or not run.plan_text.get("baselines"):
        return None
    step_s, num_devices = predicted["step_s"], run.plan.world_size
    if trained:
        hours, hours_are = trained.summary.get("train_s", 0.0) * num_devices / 3600, "measured"
        horizon = f"this run's {len(trained.metrics):,} steps"
    else:
        epoch = Epoch(num_samples=num_samples, global_batch_size=batch_size, num_devices=num_devices)
        hours, hours_are, horizon = epoch.hours(step_s), "predicted", str(epoch)
    others = tuple(_other(said, step_s) for said in run.plan_text["baselines"])
    return SavingsSection(
        finding=_finding(others, run.costs_source),
        others=others,
        hours=hours,
        hours_are=hours_are,
        horizon=horizon,
        hour=hour_of(cluster),
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
    able = sorted((other for other in others if other.why_not is None), key=lambda other: other.ratio)
    if not able:
        return "Nothing that others would run fits into memory"
    nearest, furthest = able[0], able[-1]
    of_costs = "" if source == "measured" else f" (from {source} costs)"
    for other in able:
        if other.name == TODAY:
            finding = f"Predicted{of_costs}: today's layout would take {other.ratio:.2f}x as long as this plan"
            if nearest.ratio >= 1 or other.ratio == nearest.ratio:
                return f"{finding}, so less" if other.ratio < 1 else finding
            return f"{finding}, and {_short(nearest)} {nearest.ratio:.2f}x, so less"
    if nearest.ratio < 1:
        return f"Predicted{of_costs}: {_short(nearest)} would take {nearest.ratio:.2f}x as long as this plan, so less"
    finding = f"Predicted{of_costs}: without this plan a step takes {nearest.ratio:.2f}x as long ({_short(nearest)})"
    if furthest is not nearest:
        finding += f" to {furthest.ratio:.2f}x ({_short(furthest)})"
    return finding


def _short(other: Other) -> str:
    """The baseline's name without its style in brackets, such as `(FSDP-style)`."""
    return re.sub(r" \([^)]*-style\)$", "", other.name)
