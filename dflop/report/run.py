"""The results of a run, read once for the whole report.

The data, the costs and the plan must exist. The preview and the training may be missing, and are then None.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from dflop.base import UserError
from dflop.costs import CostModel
from dflop.plan import Plan, load_plan
from dflop.schedule import StepSchedule
from dflop.store import read_meta, read_table
from dflop.train import NUM_WARMUP_STEPS, SCHEDULE_FILE
from dflop.train.run_folder import is_emulated

__all__ = ["Run", "TrainedRun", "read_run"]


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
    if not (folder / "candidates.parquet").is_file():
        raise UserError(f"{folder / 'candidates.parquet'} does not exist; make it with `dflop plan`")
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
        plan_text=yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8")),
        candidates=pl.read_parquet(folder / "candidates.parquet"),
        preview=pl.read_parquet(preview) if preview.is_file() else None,
        trained=_read_training(folder / "train"),
    )


def _read_training(folder: Path) -> TrainedRun | None:
    """The results of training; None if it has not ended, which means that there is no `summary.json`."""
    if not (folder / "summary.json").is_file():
        return None
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder / 'metrics.jsonl'} does not exist; make it with `dflop train`")
    observed, kept = folder / "observations.duckdb", folder / "observations" / SCHEDULE_FILE
    return TrainedRun(
        metrics=pl.read_ndjson(folder / "metrics.jsonl", infer_schema_length=None),
        observations=read_table(observed, "observations", made_by="train"),
        step_seconds=read_table(observed, "step_seconds", made_by="train").filter(~pl.col("warmup")),
        summary=json.loads((folder / "summary.json").read_text(encoding="utf-8")),
        schedule=StepSchedule.from_bytes(kept.read_bytes()) if kept.is_file() else None,
    )
