"""The table of a comparison with measured times beside the predicted ones."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from dflop.comparison.compare import OURS, SystemRow
from dflop.comparison.table import comparison_frame

__all__ = ["Clocked", "measured_frame", "measured_text"]

_COLUMNS = ("measured_s", "measured_over_ours", "measured_over_predicted", "busiest_core_s", "measured_steps_s")


@dataclass(frozen=True, slots=True)
class Clocked:
    """For each counted step of a row, its seconds, and the seconds for which the busiest rank's core was busy."""

    seconds: list[float]
    cpu_seconds: list[float]


def measured_frame(rows: Sequence[SystemRow], clocked: Mapping[str, Clocked]) -> pl.DataFrame:
    """The table of predictions with columns of measured medians over steps.

    The columns are the step's seconds, their ratio to ours in the same turn, their ratio to the prediction, the seconds
    for which the busiest rank's core was busy, and the seconds of each step. Rows that were not measured have nulls.
    """
    columns = [_measured(row, clocked) for row in rows]
    return pl.concat([comparison_frame(rows), pl.DataFrame(columns, infer_schema_length=None)], how="horizontal")


def measured_text(rows: Sequence[SystemRow], clocked: Mapping[str, Clocked]) -> str:
    """A line for each row, the slowest first; then the rows that were not measured, with the reason."""
    heads = ("measured", "over dflop", "busiest core", "predicted", "measured/pred.")
    lines = [f"{'system':<34}" + "".join(f"{head:>15}" for head in heads)]
    for row in sorted(rows, key=lambda row: -(_measured(row, clocked)["measured_s"] or 0.0)):
        found = _measured(row, clocked)
        if found["measured_s"] is None:
            lines.append(f"{row.name:<34}unmeasured: {row.why_not}")
            continue
        ratio = found["measured_over_predicted"]
        cells = (
            f"{found['measured_s']:.4g} s",
            f"{found['measured_over_ours']:.3f}x",
            f"{found['busiest_core_s']:.4g} s",
            f"{row.step_s:.4g} s" if ratio else "-",
            f"{ratio:.3f}" if ratio else "-",
        )
        lines.append(f"{row.name:<34}" + "".join(f"{cell:>15}" for cell in cells))
    num_steps = len(clocked[OURS].seconds)
    lines += ["", f"Measured: medians over {num_steps} steps, the rows in turns in each of them.", ""]
    lines += [f"{row.name}: {row.plan}" for row in rows if row.plan]
    return "\n".join(lines)


def _measured(row: SystemRow, clocked: Mapping[str, Clocked]) -> dict[str, object]:
    if row.name not in clocked:
        return dict.fromkeys(_COLUMNS)
    times, ours = clocked[row.name], clocked[OURS]
    over_ours = _median_ratio(times.seconds, ours.seconds)
    over_predicted = _median_ratio(times.seconds, row.steps_s) if row.steps_s else None
    seconds, busy_s = statistics.median(times.seconds), statistics.median(times.cpu_seconds)
    return dict(zip(_COLUMNS, (seconds, over_ours, over_predicted, busy_s, times.seconds), strict=True))


def _median_ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """The median of ratios step by step, so that other work on the machine slows both times of a ratio."""
    return statistics.median(value / other for value, other in zip(seconds, others, strict=True))
