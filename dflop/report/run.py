"""The results of a run, read once for the whole report.

The data, the costs and the plan must exist. The preview and the training may be missing, and are then None.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from dflop.base import UserError
from dflop.costs import CostModel
from dflop.plan import Plan, load_plan, read_plan_file
from dflop.schedule import StepSchedule
from dflop.store import read_meta, read_parquet, read_table
from dflop.train import NUM_WARMUP_STEPS, kept_schedule
from dflop.train.run_folder import is_emulated

__all__ = ["Run", "TrainedRun", "read_run"]


# Columns of `metrics.jsonl` that the report needs.
_METRICS = {"step": pl.Int64, "num_tokens": pl.Int64} | dict.fromkeys(
    ("loss", "step_s", "pipeline_s", "predicted_step_s", "idle"), pl.Float64
)


class _TimeSplit(TypedDict):
    bound_by: str


class _Summary(TypedDict, total=False):
    """The figures of a training's `summary.json` that the report needs, as far as the training has them."""

    prices: str
    train_s: float
    step_s: float
    idle: float
    restarts: int
    time_split: _TimeSplit | None
    peak_memory_bytes: dict[str, float]
    measured_over_predicted: dict[str, Any]
    correction: dict[str, Any] | None


_SUMMARY = TypeAdapter(_Summary)

# Without these columns a Parquet file is another table.
_OF_PREVIEW = ("step", "sample_id", "llm_dp_rank", "microbatch")
_OF_CANDIDATES = (
    *("rank", "placement", "num_microbatches", "checkpointing", "schedule", "num_chunks", "step_s", "idle"),
    *("bottleneck", "llm_layers", "llm_tp", "llm_pp", "llm_dp", "llm_memory_bytes"),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedRun:
    """The results of training.

    `metrics` has a row a step, and `step_seconds` a row a step and rank, for the steps after the warm-up. `schedule` is
    that of one step as it was carried out; None if training kept none.
    """

    metrics: pl.DataFrame
    observations: pl.DataFrame
    step_seconds: pl.DataFrame
    summary: dict[str, Any]
    schedule: StepSchedule | None

    @property
    def steady(self) -> pl.DataFrame:
        """The steps after the warm-up, or all steps if there are none after it."""
        return self.metrics[NUM_WARMUP_STEPS:] if len(self.metrics) > NUM_WARMUP_STEPS else self.metrics


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """The tables and files of a run. `plan_text` is all of `plan.yaml`, including the plan itself."""

    folder: Path
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
    preview: pl.DataFrame | None
    trained: TrainedRun | None

    @property
    def device_name(self) -> str:
        return ", ".join(self.device["device"].unique(maintain_order=True)) if len(self.device) else "no device"

    @property
    def costs_source(self) -> str:
        return self.costs_meta.get("source", "measured")


def read_run(folder: Path) -> Run:
    """Read the folder of a run.

    Raises:
        UserError: when the data, the costs or the plan are missing, naming the command that makes them; or when
            `train` in the folder holds an emulated run.
    """
    if is_emulated(folder / "train"):
        raise UserError(
            f"{folder / 'train'} holds an emulated run (`dflop train --emulate`), in which nothing was trained; move "
            "it away, or `dflop report` would take it for the training"
        )
    shapes, costs = folder / "shapes.duckdb", folder / "costs.duckdb"
    preview = folder / "schedule.parquet"
    return Run(
        folder=folder,
        samples=read_table(shapes, "samples", made_by="merge-shapes"),
        rejects=read_table(shapes, "rejects", made_by="merge-shapes"),
        measurements=read_table(costs, "measurements", made_by="fit-costs"),
        fit_error=read_table(costs, "fit_error", made_by="fit-costs"),
        device=read_table(costs, "device", made_by="fit-costs"),
        costs=CostModel.load(costs),
        costs_meta=read_meta(costs, made_by="fit-costs"),
        plan=load_plan(folder / "plan.yaml"),
        plan_text=read_plan_file(folder / "plan.yaml"),
        candidates=read_parquet(folder / "candidates.parquet", made_by="plan", needs=_OF_CANDIDATES),
        preview=read_parquet(preview, made_by="schedule", needs=_OF_PREVIEW) if preview.is_file() else None,
        trained=_read_training(folder / "train"),
    )


def _read_training(folder: Path) -> TrainedRun | None:
    """The results of training; None if it has not ended, which means that there is no `summary.json`."""
    if not (folder / "summary.json").is_file():
        return None
    observed = folder / "observations.duckdb"
    return TrainedRun(
        metrics=_read_metrics(folder / "metrics.jsonl"),
        observations=read_table(observed, "observations", made_by="train"),
        step_seconds=read_table(observed, "step_seconds", made_by="train").filter(~pl.col("warmup")),
        summary=_read_summary(folder / "summary.json"),
        schedule=kept_schedule(folder / "observations"),
    )


def _read_metrics(path: Path) -> pl.DataFrame:
    if not path.is_file():
        raise UserError(f"{path} does not exist; make it with `dflop train`")
    try:
        return pl.read_ndjson(path, infer_schema_length=None).cast(_METRICS)
    except (pl.exceptions.PolarsError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is damaged ({reason}); `dflop train` leaves out what is no whole step") from None


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
        _SUMMARY.validate_python(values)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()[:20])
        raise UserError(f"{path} is damaged ({reason}); `dflop train` writes it again") from None
    return values
