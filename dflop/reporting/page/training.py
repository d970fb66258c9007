"""The page's sections on the training: its curves, where a step's time went, and predictions beside measurements."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from dflop.reporting.run import TrainedRun
from dflop.reporting.style import format_seconds
from dflop.training import rank_names

__all__ = ["TimeSection", "TrainingSection", "step_spread", "time_section", "training_section"]

_MOST_POINTS = 600
_MOST_RANKS = 24
# By column of `step_seconds`, in the order of the bars.
PARTS = {
    "computing_s": "computing",
    "sync_s": "gradient sync",
    "optimiser_s": "optimiser",
    "other_s": "other",
    "data_s": "wait for data",
    "schedule_s": "wait for the schedule",
    "peers_s": "wait for peers",
    "bubble_s": "bubble",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSection:
    """The section on training. `curves` has columns of numbers for the script that draws them; each point is the mean
    of `thinned` steps."""

    finding: str
    num_steps: int
    final_loss: float
    evaluation: dict[str, Any] | None
    tokens_per_s: float
    restarts: int
    notes: tuple[str, ...]
    curves: dict[str, list[float | None]]
    thinned: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSection:
    """The section on where the time went.

    `ranks` has the label of each rank and its seconds in each of `PARTS`. `ratios` are measured over predicted seconds,
    by module and pass. `step_ratio` is the same for the whole pipeline: median, 10th and 90th percentile of steps.
    """

    verdict: str
    mean_step_s: float
    num_steps: int
    shares: dict[str, float]
    ranks: tuple[tuple[str, dict[str, float]], ...]
    num_ranks: int
    ratios: dict[str, float]
    step_ratio: tuple[float, float, float]
    rerun: str | None


def training_section(trained: TrainedRun) -> TrainingSection:
    """The section, from the metrics and the summary of training."""
    metrics, summary, steady = trained.metrics, trained.summary, trained.steady
    width = max(1, min(5, len(metrics) // 2))
    first, last = metrics["loss"].head(width).mean(), metrics["loss"].tail(width).mean()
    tokens_per_s = steady["num_tokens"].sum() / steady["step_s"].sum()
    notes = [
        f"{count:,} {what}"
        for key, what in (
            ("num_left_out", "samples were left out, which no device can hold."),
            ("num_unreadable", "media were not as profiled; they were scaled, cut, filled up or left blank."),
            ("num_undecodable", "media could not be decoded; nothing was learned from their samples."),
        )
        if (count := summary.get(key))
    ]
    means = metrics.with_columns(tokens_per_s=pl.col("num_tokens") / pl.col("step_s"))
    thinned = -(-len(means) // _MOST_POINTS)
    if thinned > 1:
        numbers = [name for name, dtype in means.schema.items() if dtype.is_numeric() and name != "step"]
        means = means.group_by((pl.int_range(pl.len()) // thinned).alias("place"), maintain_order=True).agg(
            pl.col("step").min(), pl.col(numbers).mean()
        )
    names = ("step", "loss", "evaluation_loss", "tokens_per_s", "pipeline_s", "predicted_step_s", "step_s")
    return TrainingSection(
        finding=(
            f"Over {len(metrics):,} steps the loss went from {first:.3g} to {last:.3g} nats a target token"
            + (f" (means of {width} steps)" if width > 1 else "")
            + f", at {tokens_per_s:,.0f} LLM tokens a second"
        ),
        num_steps=len(metrics),
        final_loss=float(last),
        evaluation=summary.get("evaluation"),
        tokens_per_s=float(tokens_per_s),
        restarts=summary.get("restarts", 0),
        notes=tuple(notes),
        curves={
            name: means[name].to_list()
            for name in (*names, "idle", "predicted_idle")
            if name in means.columns and means[name].dtype != pl.Null
        },
        thinned=thinned,
    )


def time_section(trained: TrainedRun) -> TimeSection | None:
    """The section; None if no step after the warm-up was observed."""
    seconds, summary = trained.step_seconds, trained.summary
    split = summary.get("time_split")
    if not len(seconds) or not split:
        return None
    means = seconds.group_by("rank").agg(pl.col(*PARTS, "step_s").mean()).sort("rank")
    waits = pl.col("bubble_s") + pl.col("peers_s")
    shown = means if len(means) <= _MOST_RANKS else means.sort(waits).head(_MOST_RANKS).sort("rank")
    names = rank_names(trained.observations)
    mean_step_s = float(means["step_s"].mean())
    ratios = (trained.steady["pipeline_s"] / trained.steady["predicted_step_s"]).to_numpy()
    ordered = pl.Series(ratios)
    return TimeSection(
        verdict=split["bound_by"],
        mean_step_s=mean_step_s,
        num_steps=seconds["step"].n_unique(),
        shares={label: float(means[column].mean()) / mean_step_s for column, label in PARTS.items()},
        ranks=tuple(
            (names.get(row["rank"], f"rank {row['rank']}"), {label: row[column] for column, label in PARTS.items()})
            for row in shown.iter_rows(named=True)
        ),
        num_ranks=len(means),
        ratios=summary.get("measured_over_predicted", {}),
        step_ratio=tuple(float(ordered.quantile(share, "linear")) for share in (0.5, 0.1, 0.9)),
        rerun=(summary.get("correction") or {}).get("rerun"),
    )


def step_spread(trained: TrainedRun) -> str:
    """The range of step times, in words."""
    low, high = (trained.steady["step_s"].quantile(share, "linear") for share in (0.25, 0.75))
    return f"median; half of the steps {format_seconds(low)} to {format_seconds(high)}"
