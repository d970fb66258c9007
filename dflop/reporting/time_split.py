"""The plot of where each rank's time went: a stacked bar a rank, in seconds of the mean step."""

import textwrap

import polars as pl
from matplotlib.figure import Figure

from dflop.reporting.style import format_seconds, heading, say_instead

__all__ = ["draw_time_split", "time_split_height_in"]

_MOST_RANKS = 24
# Characters of the finding in a line of the figure.
_FINDING_WIDTH = 115
# For each column of `step_seconds` its label and colour, from Okabe and Ito's palette; waits for other ranks are pale.
_PARTS = {
    "computing_s": ("computing", "#0072B2"),
    "sync_s": ("gradient sync", "#009E73"),
    "optimiser_s": ("optimiser", "#56B4E9"),
    "other_s": ("other", "#B5B5B5"),
    "data_s": ("wait for data", "#D55E00"),
    "schedule_s": ("wait for the schedule", "#CC79A7"),
    "peers_s": ("wait for peers", "#F3E79B"),
    "bubble_s": ("bubble (as planned)", "#E9E9E9"),
}
_LEAST_LABEL = 0.04


def time_split_height_in(seconds: pl.DataFrame) -> float:
    return 2.1 + 0.36 * max(1, min(_MOST_RANKS, seconds["rank"].n_unique()))


def draw_time_split(figure: Figure, seconds: pl.DataFrame, names: dict[int, str], finding: str | None) -> None:
    """Draw the plot. `seconds` is the table `step_seconds` of the steps after the warm-up, `names` has a label for each
    rank, and `finding` says what bounds the run."""
    axes = figure.subplots()
    if not len(seconds) or finding is None:
        say_instead(axes, "No step after the warm-up was observed.")
        return heading(figure, "Where the time went", "")
    means = seconds.group_by("rank").agg(pl.col(*_PARTS, "step_s").mean()).sort("rank")
    step_s, num_ranks = means["step_s"].mean(), len(means)
    waits = pl.col("bubble_s") + pl.col("peers_s")
    shown = means if num_ranks <= _MOST_RANKS else means.sort(waits).head(_MOST_RANKS).sort("rank")
    left = pl.Series([0.0] * len(shown))
    places = range(len(shown))
    for column, (label, colour) in _PARTS.items():
        axes.barh(places, shown[column], left=left, height=0.7, color=colour, label=label)
        ink = "white" if column in ("computing_s", "data_s") else "#222222"
        for place, (value, start) in enumerate(zip(shown[column], left, strict=True)):
            if value > _LEAST_LABEL * step_s:
                axes.text(start + value / 2, place, f"{value / step_s:.0%}", ha="center", va="center", color=ink)
        left = left + shown[column]
    axes.set_yticks(places, [names.get(rank, f"rank {rank}") for rank in shown["rank"]])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, step_s)
    axes.set(xlabel=f"seconds of the mean step, {format_seconds(step_s)} (measured)")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(_PARTS), handlelength=1.0, columnspacing=1.2)
    note = (
        f"Means of {seconds['step'].n_unique():,} steps after the warm-up. A bubble is as much of a rank's waiting for "
        "others as the plan's schedule predicts; what is beyond that is wait for peers."
    )
    if num_ranks > _MOST_RANKS:
        note += f" Of {num_ranks:,} ranks those {_MOST_RANKS} are drawn that wait least for others."
    return heading(figure, textwrap.fill(finding, _FINDING_WIDTH), note)
