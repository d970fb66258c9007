"""The report: reads a run's artifacts, draws its plots and writes its figures down.

Every plot is a file of its own that draws what it is given; what is computed for them, and read from where,
stands here. Predictions and measurements are named as such throughout.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml

from dflop.config import Config
from dflop.costs import CostModel
from dflop.parallelism import Plan, load_plan
from dflop.pipeline import Node
from dflop.planning import read_baselines
from dflop.pricing import prices_digest
from dflop.reporting.costs import costs_height_in, draw_costs, measured_points
from dflop.reporting.plans import draw_plans, plans_height_in
from dflop.reporting.schedules import PreviewPrices, price_preview, replay
from dflop.reporting.shapes import draw_shapes, items_tokens_correlation, shapes_height_in
from dflop.reporting.style import drawing, format_seconds
from dflop.reporting.time_split import draw_time_split, time_split_height_in
from dflop.reporting.timeline import StepPanel, draw_timeline, measured_boxes, predicted_boxes, timeline_height_in
from dflop.reporting.training import draw_training
from dflop.runtime import UserError, written_whole
from dflop.scheduling import BatchScheduler
from dflop.scheduling.service import open_scheduler
from dflop.store import read_meta, read_table
from dflop.training import rank_names

__all__ = ["plot_shapes", "write_report"]


def write_report(config: Config, run_folder: Path, out: Path) -> list[Path]:
    """Five plots and `summary.json`, which is written last; returns their paths. `plot_shapes` draws the sixth.

    Raises:
        UserError: when an artifact is missing, naming the command that makes it.
    """
    run = _read_run(run_folder)
    scheduler = open_scheduler(
        config,
        shapes=run_folder / "shapes.duckdb",
        costs=run_folder / "costs.duckdb",
        plan=run_folder / "plan.yaml",
    )
    with scheduler.open():
        is_of_these = run.summary.get("prices") in (None, prices_digest(scheduler.pricer))
        prices = price_preview(scheduler, run.preview, run_folder / "schedule.parquet")
        step = _middle_step(run)
        panels, step_figures, finding = _step_panels(config, scheduler, run, step if is_of_these else None)
    rejects = _counts(run.rejects["reason"])
    points = measured_points(run.measurements, run.costs)
    device = ", ".join(run.device["device"].unique(maintain_order=True)) if len(run.device) else "no device"

    if not is_of_these:
        print(
            f"dflop: warning: {run_folder / 'train'} was trained with other costs or another plan than costs.duckdb "
            "and plan.yaml hold: training.svg shows that run, and timeline.svg no measured step; `train.resume: never` "
            "trains anew",
            file=sys.stderr,
        )
    with drawing(out / "costs.svg", costs_height_in(points)) as figure:
        draw_costs(figure, points, run.fit_error, run.costs, run.costs_meta, device)
    with drawing(out / "plans.svg", plans_height_in(run.candidates)) as figure:
        draw_plans(figure, run.candidates, run.plan, config.cluster.memory_gib)
    with drawing(out / "timeline.svg", timeline_height_in(run.plan, len(panels))) as figure:
        draw_timeline(figure, panels, run.plan, finding)
    with drawing(out / "training.svg", 6.2) as figure:
        draw_training(figure, run.metrics)
    with drawing(out / "time_split.svg", time_split_height_in(run.step_seconds)) as figure:
        found = (run.summary.get("time_split") or {}).get("bound_by")
        draw_time_split(figure, run.step_seconds, rank_names(run.observations), found)
    summary = {
        "run": config.run,
        "data": _data_figures(run, rejects, len(scheduler.left_out)),
        "costs": _cost_figures(run, device),
        "plan": _plan_figures(run, read_baselines(run_folder / "plan.yaml")),
        "schedule": _schedule_figures(prices, config.schedule.policy),
        "one_step": step_figures,
        "training": run.summary,
        # Whether the run was trained with the costs and the plan that the other figures are of.
        "training_is_of_this_plan": is_of_these,
    }
    with written_whole(out / "summary.json") as path:
        path.write_text(json.dumps(_rounded(summary), indent=2) + "\n", encoding="utf-8")
    return [out / name for name in _NAMES]


_NAMES = ("costs.svg", "plans.svg", "timeline.svg", "training.svg", "time_split.svg", "summary.json")


def plot_shapes(shapes: Path, out: Path) -> None:
    """Draw the shapes of a dataset, of which nothing but `shapes.duckdb` is needed.

    Raises:
        UserError: when that file is missing.
    """
    samples, rejects = (read_table(shapes, table, made_by="merge-shapes") for table in ("samples", "rejects"))
    with drawing(out, shapes_height_in(samples, rejects)) as figure:
        draw_shapes(figure, samples, rejects)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Run:
    """What a finished run left behind."""

    samples: pl.DataFrame
    rejects: pl.DataFrame
    measurements: pl.DataFrame
    fit_error: pl.DataFrame
    device: pl.DataFrame
    costs: CostModel
    costs_meta: dict[str, str]
    plan: Plan
    plan_text: dict[str, Any]
    candidates: pl.DataFrame
    preview: pl.DataFrame
    metrics: pl.DataFrame
    observations: pl.DataFrame
    step_seconds: pl.DataFrame
    summary: dict[str, Any]


def _read_run(folder: Path) -> _Run:
    shapes, costs, train = folder / "shapes.duckdb", folder / "costs.duckdb", folder / "train"
    for path, command in (
        (folder / "candidates.parquet", "plan"),
        (folder / "schedule.parquet", "schedule"),
        (train / "metrics.jsonl", "train"),
        (train / "summary.json", "train"),
    ):
        if not path.is_file():
            raise UserError(f"{path} does not exist; make it with `dflop {command}`")
    return _Run(
        samples=read_table(shapes, "samples", made_by="merge-shapes"),
        rejects=read_table(shapes, "rejects", made_by="merge-shapes"),
        measurements=read_table(costs, "measurements", made_by="fit-costs"),
        fit_error=read_table(costs, "fit_error", made_by="fit-costs"),
        device=read_table(costs, "device", made_by="fit-costs"),
        costs=CostModel.load(costs),
        costs_meta=read_meta(costs, made_by="fit-costs"),
        plan=load_plan(folder / "plan.yaml"),
        plan_text=yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8")),
        candidates=pl.read_parquet(folder / "candidates.parquet"),
        preview=pl.read_parquet(folder / "schedule.parquet"),
        metrics=pl.read_ndjson(train / "metrics.jsonl", infer_schema_length=None),
        observations=read_table(train / "observations.duckdb", "observations", made_by="train"),
        step_seconds=read_table(train / "observations.duckdb", "step_seconds", made_by="train").filter(
            ~pl.col("warmup")
        ),
        summary=json.loads((train / "summary.json").read_text(encoding="utf-8")),
    )


def _middle_step(run: _Run) -> int:
    """The step in the middle of those that were observed warm."""
    observed = run.observations
    if "warmup" in observed.columns and not observed["warmup"].all():
        observed = observed.filter(~pl.col("warmup"))
    steps = sorted(set(observed["step"]) & set(run.metrics["step"]))
    if not steps:
        raise UserError("train/observations.duckdb and train/metrics.jsonl share no step; run `dflop train` again")
    return steps[len(steps) // 2]


def _step_panels(
    config: Config, scheduler: BatchScheduler, run: _Run, trained_step: int | None
) -> tuple[list[StepPanel], dict[str, Any], str]:
    """The step as scheduled, as `random` would have it, and as measured; its figures, and what they say.

    Without a step that was trained by this plan and these costs it is the first one, and nothing measured is shown.
    """
    step = trained_step or 0
    plan = scheduler.pricer.plan
    policy = config.schedule.policy
    ours, other = scheduler.schedule(step), scheduler.schedule(step, "random")
    faster = other.step_s / ours.step_s
    titles = (
        f"{policy}, predicted: {format_seconds(ours.step_s)}, idle {ours.idle:.0%}",
        f"random, predicted: {format_seconds(other.step_s)}, idle {other.idle:.0%}, {faster:.2f}x as long",
    )
    panels = [
        StepPanel(title, predicted_boxes(plan, *replay(scheduler, schedule)), schedule.step_s)
        for title, schedule in zip(titles, (ours, other), strict=True)
    ]
    figures = {
        "step": step,
        f"predicted_s_{policy}": ours.step_s,
        "predicted_s_random": other.step_s,
        "lower_bound_s": ours.lower_bound_s,
    }
    finding = f"Step {step}: {policy} is predicted {_faster(faster)} than random on the same samples"
    if trained_step is None:
        return panels, figures, f"{finding}; the run was trained by another plan or other costs"
    observed = run.observations.filter(pl.col("step") == step)
    measured = run.metrics.filter(pl.col("step") == step).row(0, named=True)
    is_same = _is_trained_as(observed, scheduler.pricer.nodes, ours.forward_s, ours.backward_s)
    slower = measured["pipeline_s"] / measured["predicted_step_s"]
    title = (
        f"{measured.get('policy', policy)}, measured: {format_seconds(measured['pipeline_s'])}, "
        f"idle {measured['idle']:.0%}, {slower:.2f}x its prediction"
        + ("" if is_same else f" of {format_seconds(measured['predicted_step_s'])} (not the assignment drawn above)")
    )
    panels.append(StepPanel(title, measured_boxes(plan, observed), measured["pipeline_s"]))
    figures |= {"measured_s": measured["pipeline_s"], "measured_over_predicted": slower}
    return panels, figures, f"{finding}; measured, the step took {slower:.2f}x its prediction"


def _faster(ratio: float) -> str:
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def _is_trained_as(
    observed: pl.DataFrame, nodes: tuple[Node, ...], forward_s: np.ndarray, backward_s: np.ndarray
) -> bool:
    """Whether the trainer's predictions are these: a time limit or a correction may have led it elsewhere."""
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


def _data_figures(run: _Run, rejects: dict[str, int], num_too_large: int) -> dict[str, Any]:
    samples = run.samples
    return {
        "num_samples": len(samples),
        "num_rejects": len(run.rejects),
        "rejects": rejects,
        "modalities": _counts(samples["modality"]),
        "num_with_audio_left_out": int((samples["audio_tokens"] > 0).sum()),
        "num_too_large_left_out": num_too_large,
        "num_truncated": int(samples["truncated"].sum()),
        "num_items": _quantiles(samples["num_items"]),
        "text_tokens": _quantiles(samples["text_tokens"]),
        "llm_tokens": _quantiles(samples["llm_tokens"]),
        "correlation_items_llm_tokens": items_tokens_correlation(samples),
    }


def _cost_figures(run: _Run, device: str) -> dict[str, Any]:
    return {
        "source": run.costs_meta.get("source", "measured"),
        "device": device,
        "held_out_error": {
            f"{row['module']} tp{row['tp']} {row['pass'] or 'peak memory'}": {
                "median": row["median_error"],
                "p95": row["p95_error"],
            }
            for row in run.fit_error.iter_rows(named=True)
        },
    }


def _plan_figures(run: _Run, baselines: dict[str, str]) -> dict[str, Any]:
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
    """Floats to four digits, for people to read."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.4g}")
    return value
