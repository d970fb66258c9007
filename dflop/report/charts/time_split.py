"""Where each rank's time went: a stacked bar a rank, in seconds of the mean step."""

import polars as pl

from dflop.report.facts import Facts
from dflop.report.picture import Panel, Picture, as_given, hover, kind, layer, names, number, rows
from dflop.report.style import PARTS, colour, format_seconds
from dflop.train import rank_names

__all__ = ["TIME_PARTS", "draw", "draw_time_split"]

_MOST_RANKS = 24
# For each column of `step_seconds` its label, in the order of the bars.
TIME_PARTS = {
    "computing_s": "computing",
    "sync_s": "gradient sync",
    "optimiser_s": "optimiser",
    "other_s": "other",
    "data_s": "wait for data",
    "schedule_s": "wait for the schedule",
    "peers_s": "wait for peers",
    "bubble_s": "bubble (as planned)",
}
_LEAST_LABEL = 0.04
# The colours of shares where they are not black.
_INKS = {"computing": "#ffffff", "wait for data": "#ffffff", "bubble (as planned)": colour("ink")}


def draw(facts: Facts) -> Picture | None:
    if facts.run.trained is None:
        return None
    trained = facts.run.trained
    found = (trained.summary.get("time_split") or {}).get("bound_by")
    return draw_time_split(trained.step_seconds, rank_names(trained.observations), found)


def draw_time_split(seconds: pl.DataFrame, labels: dict[int, str], finding: str | None) -> Picture:
    """The picture of the table `step_seconds` of the steps after the warm-up. `labels` has a label for each rank, and
    `finding` says what bounds the run."""
    if not len(seconds) or finding is None:
        none = "No step after the warm-up was observed."
        return Picture(section="time", finding="Where the time went", note=none, panels=[])
    means = seconds.group_by("rank").agg(pl.col(*TIME_PARTS, "step_s").mean()).sort("rank")
    step_s, num_ranks = means["step_s"].mean(), len(means)
    waits = pl.col("bubble_s") + pl.col("peers_s")
    shown = means if num_ranks <= _MOST_RANKS else means.sort(waits).head(_MOST_RANKS).sort("rank")
    table = []
    for row in shown.iter_rows(named=True):
        rank, end = labels.get(row["rank"], f"rank {row['rank']}"), 0.0
        for column, part in TIME_PARTS.items():
            start, end = end, end + row[column]
            share = f"{row[column] / step_s:.0%}" if row[column] > _LEAST_LABEL * step_s else ""
            table.append((rank, part, share, format_seconds(row[column]), _INKS.get(part, "#1c1e21"), start, end))
    texts = dict.fromkeys(("rank", "part", "share", "takes", "ink"), pl.String)
    frame = pl.DataFrame(table, schema=texts | {"start": pl.Float64, "end": pl.Float64}, orient="row")
    frame = frame.with_columns(middle=(pl.col("start") + pl.col("end")) / 2)
    scale, axis = {"domain": [0, step_s]}, {"grid": False, "format": "~g"}
    x, y = number("start", "seconds of the mean step", scale=scale, axis=axis), names("rank")
    colours = kind("part", dict(zip(TIME_PARTS.values(), PARTS, strict=True)))
    said = hover(rank="", part="", takes="", share="")
    layers = [
        layer("bar", look={"clip": True}, x=x, x2="end", y=y, color=colours, tooltip=said),
        layer("text", x=x | {"field": "middle"}, y=y, text="share", color=as_given("ink")),
    ]
    note = (
        f"Means of {seconds['step'].n_unique():,} steps after the warm-up. A bubble is as much of a rank's waiting for "
        "others as the plan's schedule predicts; what is beyond that is wait for peers."
    )
    if num_ranks > _MOST_RANKS:
        note += f" Of {num_ranks:,} ranks those {_MOST_RANKS} are drawn that wait least for others."
    panel = Panel(
        title=f"Where each rank's time went: seconds of the mean step, {format_seconds(step_s)} (measured)",
        view={"data": rows(frame), "layer": layers},
        height=30 * len(shown),
    )
    return Picture(section="time", finding=finding, note=note, panels=[panel])
