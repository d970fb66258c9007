"""The page's sections on the training: its curves, where a step's time went, and predictions beside measurements."""

from typing import Any

import polars as pl

from dflop.report.charts.time_split import TIME_PARTS
from dflop.report.run import TrainedRun
from dflop.report.style import format_seconds

__all__ = ["step_spread", "time_section", "training_section"]


def training_section(trained: TrainedRun) -> dict[str, Any]:
    """The section, from the metrics and the summary of training."""
    metrics, summary, steady = trained.metrics, trained.summary, trained.steady
    width = max(1, min(5, len(metrics) // 2))
    first, last = metrics["loss"].head(width).mean(), metrics["loss"].tail(width).mean()
    tokens_per_s = steady["num_tokens"].sum() / steady["step_s"].sum()
    notes = [
        f"{count:,} {sentence}"
        for key, sentence in (
            ("num_left_out", "samples were left out, which no device can hold."),
            ("num_left_out_of_batches", "samples were left out of batches that did not fit into memory with them."),
            ("num_unreadable", "media were not as profiled; they were scaled, cut, filled up or left blank."),
            ("num_undecodable", "media could not be decoded; nothing was learned from their samples."),
            ("num_eager", "functions of layers were not compiled, or not for all inputs, and ran eager."),
        )
        if (count := summary.get(key))
    ]
    return {
        "finding": (
            f"Over {len(metrics):,} steps the loss went from {first:.3g} to {last:.3g} nats a target token"
            + (f" (means of {width} steps)" if width > 1 else "")
            + f", at {tokens_per_s:,.0f} LLM tokens a second"
        ),
        "evaluation": summary.get("evaluation"),
        "restarts": summary.get("restarts", 0),
        "notes": notes,
    }


def time_section(trained: TrainedRun) -> dict[str, Any] | None:
    """The section; None if no step after the warm-up was observed.

    `shares` are parts of the mean step. `ratios` are measured over predicted seconds, by module and pass. `step_ratio`
    is the same for the whole pipeline: median, 10th and 90th percentile of steps.
    """
    seconds, summary = trained.step_seconds, trained.summary
    split = summary.get("time_split")
    if not len(seconds) or not split:
        return None
    means = seconds.select(pl.col(*TIME_PARTS, "step_s").mean())
    mean_step_s = means["step_s"].item()
    ratios = trained.steady["pipeline_s"] / trained.steady["predicted_step_s"]
    return {
        "verdict": split["bound_by"],
        "mean_step_s": mean_step_s,
        "shares": {label: means[column].item() / mean_step_s for column, label in TIME_PARTS.items()},
        "ratios": summary.get("measured_over_predicted", {}),
        "step_ratio": [ratios.quantile(share, "linear") for share in (0.5, 0.1, 0.9)],
        "rerun": (summary.get("correction") or {}).get("rerun"),
    }


def step_spread(trained: TrainedRun) -> str:
    """The range of step times, in words."""
    low, high = (trained.steady["step_s"].quantile(share, "linear") for share in (0.25, 0.75))
    return f"median; half of the steps {format_seconds(low)} to {format_seconds(high)}"
