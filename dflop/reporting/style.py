"""The look that all plots share: size, palette, fonts, and how numbers are written.

Plots are SVG with real text, and the same data gives the same bytes. Colours are of Okabe and Ito's palette,
which colour-blind readers can tell apart; every module has a light shade for forward and a dark one for backward.
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from dflop.runtime import written_whole

__all__ = [
    "EVALUATED",
    "INK",
    "MEASURED",
    "MODALITY_COLOURS",
    "MODULE_SHADES",
    "MUTED",
    "PALE",
    "PREDICTED",
    "drawing",
    "format_count",
    "format_seconds",
    "heading",
    "legend_beside_title",
    "say_instead",
]

# Characters of a note in a line of the figure.
_NOTE_WIDTH = 200
# 12.5 inches are 1200 pixels in a browser.
_WIDTH_IN = 12.5

INK, MUTED, PALE = "#222222", "#767676", "#e9e9e9"
MEASURED, PREDICTED, EVALUATED = "#222222", "#D55E00", "#0072B2"

# (forward, backward)
MODULE_SHADES = {
    "vision": ("#8EC1E3", "#0072B2"),
    "audio": ("#8AD1BB", "#009E73"),
    "llm": ("#F5B88A", "#C75300"),
}

MODALITY_COLOURS = {
    "text": "#767676",
    "image": "#0072B2",
    "multi_image": "#56B4E9",
    "video": "#D55E00",
    "audio": "#009E73",
    "mixed": "#CC79A7",
}

_STYLE = {
    # The text is laid out with DejaVu Sans; Verdana is as wide.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 7.0,
    "axes.edgecolor": "#9a9a9a",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "xtick.color": "#9a9a9a",
    "ytick.color": "#9a9a9a",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "dflop",
}


@contextmanager
def drawing(path: Path, height_in: float) -> Iterator[Figure]:
    """An empty figure of the common width; it is saved at `path` when the block ends without an error."""
    with rc_context(_STYLE), written_whole(path) as beside:
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        yield figure
        _settle(figure)
        figure.savefig(beside, format="svg", metadata={"Date": None})


def _settle(figure: Figure) -> None:
    """Lay the figure out and round the panels' positions, because the solver's last bits differ from call to call."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for part in figure.findobj(SubFigure):
        part.bbox_relative.set_points(np.round(part.bbox_relative.get_points(), 6))
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position().bounds, 6))


def heading(figure: Figure, finding: str, note: str) -> None:
    """Put the figure's finding above it, in one line, and a note on how to read it below."""
    figure.suptitle(finding, x=0.008, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(textwrap.fill(note, _NOTE_WIDTH), x=0.008, ha="left", fontsize=8.5, color=MUTED)


def legend_beside_title(axes: Axes, handles: Sequence[Artist]) -> None:
    """Put the legend at the right end of the title's line, where no data can be."""
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        borderpad=0.2,
        borderaxespad=0.2,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.4,
    )


def say_instead(axes: Axes, text: str) -> None:
    """Write a text into a panel that has no data."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)


def format_seconds(seconds: float) -> str:
    """Seconds with three digits and their unit, such as `1.23 s` or `45.6 ms`."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    value, unit = (seconds, "s") if seconds >= 0.1 else (seconds * 1e3, "ms")
    return f"{value:#.3g} {unit}".replace(". ", " ")


def format_count(count: float) -> str:
    """A count with separators for thousands; with three digits if it is a small fraction."""
    return f"{count:,.0f}" if count >= 10 or count == round(count) else f"{count:.3g}"
