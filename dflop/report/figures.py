"""The run's figures as numbers: `summary.json`, in the order of the report."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflop.base import written_whole
from dflop.models import ModelSpec
from dflop.report.charts.shapes import items_tokens_correlation
from dflop.report.facts import Facts
from dflop.report.run import Run
from dflop.report.schedules import PreviewPrices
from dflop.search import read_baselines
from dflop.shapes import without_unencoded

__all__ = ["write_figures"]


def write_figures(path: Path, facts: Facts, *, num_too_large: int) -> None:
    """Write `summary.json`. `num_too_large` counts the samples that the plan's devices cannot hold."""
    run = facts.run
    summary = {
        "run": facts.config.run,
        "data": _data_figures(run, facts.spec, num_too_large),
        "costs": _cost_figures(run),
        "plan": _plan_figures(run, read_baselines(run.folder / "plan.yaml")),
        "schedule": _schedule_figures(facts.preview, facts.config.schedule.policy) if facts.preview else None,
        "one_step": facts.shown.figures,
        "training": run.trained.summary if run.trained else None,
        "training_is_of_this_plan": not facts.is_foreign if run.trained else None,
    }
    with written_whole(path) as beside:
        beside.write_text(json.dumps(_rounded(summary), indent=2) + "\n", encoding="utf-8")


def _data_figures(run: Run, spec: ModelSpec, num_too_large: int) -> dict[str, Any]:
    samples = run.samples
    return {
        "num_samples": len(samples),
        "num_rejects": len(run.rejects),
        "rejects": _counts(run.rejects["reason"]),
        "modalities": _counts(samples["modality"]),
        "left_out_without_encoder": without_unencoded(samples, spec.encoders)[1],
        "num_too_large_left_out": num_too_large,
        "num_truncated": int(samples["truncated"].sum()),
        "num_items": _quantiles(samples["num_items"]),
        "text_tokens": _quantiles(samples["text_tokens"]),
        "llm_tokens": _quantiles(samples["llm_tokens"]),
        "correlation_items_llm_tokens": items_tokens_correlation(samples),
    }


def _cost_figures(run: Run) -> dict[str, Any]:
    return {
        "source": run.costs_source,
        "device": run.device_name,
        "held_out_error": {
            f"{row['module']} tp{row['tp']} {row['pass'] or 'peak memory'}": {
                "median": row["median_error"],
                "p95": row["p95_error"],
            }
            for row in run.fit_error.iter_rows(named=True)
        },
    }


def _plan_figures(run: Run, baselines: dict[str, str]) -> dict[str, Any]:
    predicted = run.plan_text.get("predicted", {})
    return {
        "plan": str(run.plan),
        "predicted_step_s": predicted.get("step_s"),
        "predicted_idle": predicted.get("idle"),
        "predicted_memory_bytes": predicted.get("memory_bytes"),
        "num_candidates": len(run.candidates),
        "why": run.plan_text.get("why"),
        "baselines": baselines,
    }


def _schedule_figures(prices: PreviewPrices, policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "num_batches": prices.num_batches,
        "predicted_step_s": prices.step_s,
        "predicted_step_s_random": prices.random_step_s,
        "times_faster_than_random": prices.random_step_s / prices.step_s,
        "lower_bound_s": prices.lower_bound_s,
        "times_the_lower_bound": prices.step_s / prices.lower_bound_s,
        "predicted_idle": prices.idle,
        "predicted_idle_random": prices.random_idle,
        "predicted_memory_bytes": prices.memory_bytes,
    }


def _counts(column: pl.Series) -> dict[str, int]:
    """How often each value occurs, the most frequent first."""
    counted = column.value_counts(sort=False, name="count")
    return dict(counted.sort(["count", column.name], descending=[True, False]).rows())


def _quantiles(column: pl.Series) -> dict[str, float]:
    return {
        "p50": statistics.median(column),
        "p95": float(np.quantile(column.to_numpy(), 0.95)),
        "max": column.max(),
    }


def _rounded(value: Any) -> Any:
    """A copy with floats rounded to four significant digits, for people to read."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.4g}")
    return value
