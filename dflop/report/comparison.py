"""The picture of a comparison: each system's step time, idle share, and variation of its microbatches."""

import math
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from dflop.comparison import OURS, SystemRow
from dflop.report.picture import Panel, Picture, layer, names, number, rows, write_picture
from dflop.report.style import colour, format_seconds

__all__ = ["plot_comparison"]


def plot_comparison(systems: Sequence[SystemRow], path: Path) -> None:
    """Draw the systems of which any plan fits into memory, the slowest first."""
    shown = sorted(
        (row for row in systems if math.isfinite(row.step_s)), key=lambda row: (-row.step_s, row.name == OURS)
    )
    ours = next(row for row in systems if row.name == OURS)
    best_other = min((row for row in shown if row.name != OURS), key=lambda row: row.step_s, default=None)
    finding = f"A step of {format_seconds(ours.step_s)}"
    if best_other:
        ratio = best_other.step_s / ours.step_s
        finding += f"; the fastest of the others, {best_other.name}, takes {ratio:.2f}x as long"
    missing = [row.name for row in systems if not math.isfinite(row.step_s)]
    note = (
        "Predicted, by one simulator, on the same batches; every system has the plan of its kind that is fastest. "
        "Variation: standard deviation over mean of what the microbatches of one module cost."
        + (f" Nothing fits of: {', '.join(missing)}." if missing else "")
    )
    times = [f"{format_seconds(row.step_s)} · {row.step_s / ours.step_s:.2f}x" for row in shown]
    columns = {
        "Step time": ([row.step_s for row in shown], times),
        "Idle share of rank time": ([row.idle for row in shown], [f"{row.idle:.0%}" for row in shown]),
        "Variation of microbatches": ([row.variation for row in shown], [f"{row.variation:.2f}" for row in shown]),
    }
    panels = []
    for title, (values, texts) in columns.items():
        table = pl.DataFrame({"name": [row.name for row in shown], "value": values, "text": texts})
        y = names("name", axis=None) if panels else names("name")
        mine = {"condition": {"test": f"datum.name == '{OURS}'", "value": colour("predicted")}, "value": colour("bar")}
        x = number("value", axis=None, scale={"domain": [0, 1.35 * max(values) or 1.0]})
        bars = layer("bar", look={"height": {"band": 0.66}}, color=mine)
        texts_beside = layer("text", look={"align": "left", "dx": 4}, text="text")
        view = {"data": rows(table), "encoding": {"x": x, "y": y}, "layer": [bars, texts_beside]}
        panels.append(Panel(title=title, view=view, height=32 * len(shown), share=1.0 if panels else 2.6))
    write_picture(Picture(section="comparison", finding=finding, note=note, panels=panels, columns=3), path)
