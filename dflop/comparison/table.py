"""The results of a comparison as text, as a data frame, and as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import polars as pl

from dflop.comparison.compare import OURS, SystemRow
from dflop.config import Config
from dflop.costs import CostModel

__all__ = ["comparison_frame", "comparison_json", "comparison_text"]

# The row that speed-ups are relative to, where it has a plan that fits.
_REFERENCE = "Megatron-style, random"
_COLUMNS = {
    "system": 34,
    "step": 10,
    "speed-up": 9,
    "over dflop": 11,
    "idle": 7,
    "variation": 10,
    "memory": 11,
    "to decide": 11,
    "over bound": 11,
}


def comparison_frame(rows: Sequence[SystemRow]) -> pl.DataFrame:
    """A row for each system; a system without a plan that fits has nulls."""
    reference_s, ours_s = (_step_s(rows, name) for name in (_REFERENCE, OURS))
    columns = [
        asdict(row) | {"speed_up": _over(reference_s, row.step_s), "over_ours": _over(row.step_s, ours_s)}
        for row in rows
    ]
    return pl.DataFrame(columns, infer_schema_length=None).with_columns(pl.col(pl.Float64).fill_nan(None))


def comparison_json(rows: Sequence[SystemRow], config: Config, costs: CostModel) -> str:
    """The rows, and the model, devices and batch size that they were priced for."""
    cluster = config.cluster
    said = {
        "model": config.model.path or config.model.preset,
        "devices": cluster.num_nodes * cluster.devices_per_node,
        "device_model": cluster.device_model,
        "memory_gib": cluster.memory_gib,
        "global_batch_size": config.train.global_batch_size,
        "costs": costs.source,
        "systems": comparison_frame(rows).to_dicts(),
    }
    return json.dumps(said, indent=2) + "\n"


def comparison_text(rows: Sequence[SystemRow]) -> str:
    """A line for each system, the fastest last, and below them the plan of each."""
    reference_s, ours_s = (_step_s(rows, name) for name in (_REFERENCE, OURS))
    (system, width), *others = _COLUMNS.items()
    lines = [f"{system:<{width}}" + "".join(f"{name:>{wide}}" for name, wide in others)]
    shown = sorted(rows, key=lambda row: (-row.step_s, row.name == OURS))
    for row in shown:
        if row.plan is None or not math.isfinite(row.step_s):
            lines.append(f"{row.name:<34}{row.why_not}")
            continue
        speed_up = _over(reference_s, row.step_s)
        cells = (
            f"{row.step_s:.4g} s",
            "-" if speed_up is None else f"{speed_up:.2f}x",
            f"{row.step_s / ours_s:.3f}x",
            f"{row.idle:.1%}",
            f"{row.variation:.2f}",
            f"{row.memory_bytes / 2**30:.1f} GiB",
            f"{row.deciding_s * 1e3:,.0f} ms",
            f"+{row.gap:.1%}",
        )
        widths = list(_COLUMNS.values())[1:]
        marks = f"  {row.num_fitted} made to fit" if row.num_fitted else ""
        lines.append(
            f"{row.name:<34}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) + marks
        )
    lines += ["", "Predicted. Over bound: above the least that any schedule of the system's own plan could take.", ""]
    lines += [f"{row.name}: {row.plan}" for row in shown if row.plan]
    return "\n".join(lines)


def _step_s(rows: Sequence[SystemRow], name: str) -> float:
    return next((row.step_s for row in rows if row.name == name), math.inf)


def _over(seconds: float, other_s: float) -> float | None:
    return seconds / other_s if math.isfinite(seconds) and math.isfinite(other_s) else None
