"""The plot of a comparison: each system's step time, idle share, and variation of its microbatches."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from dflop.comparison import OURS, SystemRow
from dflop.reporting.style import MUTED, PREDICTED, drawing, format_seconds, heading

__all__ = ["plot_comparison"]

_OTHERS = "#9fb3c4"


def plot_comparison(rows: Sequence[SystemRow], path: Path) -> None:
    """Draw the systems of which any plan fits into memory, the slowest first."""
    shown = sorted((row for row in rows if math.isfinite(row.step_s)), key=lambda row: (-row.step_s, row.name == OURS))
    ours = next(row for row in rows if row.name == OURS)
    best_other = min((row for row in shown if row.name != OURS), key=lambda row: row.step_s, default=None)
    finding = f"A step of {format_seconds(ours.step_s)}"
    if best_other:
        ratio = best_other.step_s / ours.step_s
        finding += f"; the fastest of the others, {best_other.name}, takes {ratio:.2f}x as long"
    missing = [row.name for row in rows if not math.isfinite(row.step_s)]
    note = (
        "Predicted, by one simulator, on the same batches; every system has the plan of its kind that is fastest. "
        "Variation: standard deviation over mean of what the microbatches of one module cost."
        + (f" Nothing fits of: {', '.join(missing)}." if missing else "")
    )
    colours = [PREDICTED if row.name == OURS else _OTHERS for row in shown]
    with drawing(path, 1.6 + 0.32 * len(shown)) as figure:
        steps, idle, variation = figure.subplots(1, 3, sharey=True, width_ratios=[3, 1.2, 1.2])
        for axes, values, texts, title in (
            (
                steps,
                [row.step_s for row in shown],
                [f"{format_seconds(row.step_s)} · {row.step_s / ours.step_s:.2f}x" for row in shown],
                "Step time",
            ),
            (idle, [row.idle for row in shown], [f"{row.idle:.0%}" for row in shown], "Idle share of rank time"),
            (
                variation,
                [row.variation for row in shown],
                [f"{row.variation:.2f}" for row in shown],
                "Variation of microbatches",
            ),
        ):
            _bars(axes, values, texts, colours)
            axes.set_title(title)
        steps.set_yticks(range(len(shown)), [row.name for row in shown])
        steps.set_ylim(len(shown) - 0.4, -0.6)
        heading(figure, finding, note)


def _bars(axes: Axes, values: list[float], texts: list[str], colours: list[str]) -> None:
    places = np.arange(len(values))
    axes.barh(places, values, height=0.66, color=colours)
    for place, value, text in zip(places, values, texts, strict=True):
        axes.annotate(text, (value, place), xytext=(4, 0), textcoords="offset points", va="center", color=MUTED)
    axes.set_xlim(0, 1.3 * max(values) or 1.0)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
