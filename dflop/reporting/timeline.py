"""The plot of one step: who computes which microbatch when, as scheduled, as `random` would have it, as measured.

All panels have one time axis and the same rows, a row a worker (a replica of a pipeline stage), and show
boxes: a frame with the columns worker, module, pass, microbatch, start_s, end_s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dflop.pipeline import StageTimes, Timeline, Worker
from dflop.reporting.style import INK, MODULE_SHADES, MUTED, format_seconds, heading, legend_beside_title

__all__ = ["StepPanel", "draw_timeline", "measured_boxes", "predicted_boxes", "timeline_height_in"]

_MOST_ROWS = 20
_SYNC_COLOUR = "#CC79A7"
# About what a digit takes of the 12.5 inches' time axis.
_DIGIT_SHARE = 0.0062


@dataclass(frozen=True, slots=True)
class StepPanel:
    """One way the step went or would go; `step_s` ends it."""

    title: str
    boxes: pl.DataFrame
    step_s: float


def predicted_boxes(workers: Sequence[Worker], times: StageTimes, timeline: Timeline) -> pl.DataFrame:
    """The simulator's starts and ends; the gradient sync follows a worker's last computation."""
    rows = []
    for index, worker in enumerate(workers):
        for direction, name in enumerate(("forward", "backward")):
            for microbatch in np.flatnonzero(timeline.end_s[direction, index] > timeline.start_s[direction, index]):
                start_s, end_s = (table[direction, index, microbatch] for table in (timeline.start_s, timeline.end_s))
                rows.append((index, worker.module, name, int(microbatch), float(start_s), float(end_s)))
        if times.sync_s[index]:
            started = float(np.nanmax(timeline.end_s[:, index]))
            rows.append((index, worker.module, "sync", -1, started, started + float(times.sync_s[index])))
    return _boxes(rows)


def measured_boxes(workers: Sequence[Worker], observations: pl.DataFrame) -> pl.DataFrame:
    """One step's observations. Of tensor-parallel ranks, which act as one worker, the first is taken."""
    place = {(worker.module, worker.pp_stage, worker.dp_rank): index for index, worker in enumerate(workers)}
    first = pl.col("rank") == pl.col("rank").min().over("module", "pp_stage", "dp_rank")
    rows = [
        (
            place[row["module"], row["pp_stage"], row["dp_rank"]],
            row["module"],
            row["pass"],
            row["microbatch"],
            row["start_s"],
            row["start_s"] + row["seconds"],
        )
        for row in observations.filter(first).iter_rows(named=True)
    ]
    return _boxes(rows)


def timeline_height_in(workers: Sequence[Worker], num_panels: int) -> float:
    return 1.6 + num_panels * (0.45 + _row_in(workers) * len(_shown(workers)))


def draw_timeline(figure: Figure, panels: Sequence[StepPanel], workers: Sequence[Worker], finding: str) -> None:
    """One panel below the other, in the order given."""
    shown = _shown(workers)
    longest_s = max(panel.step_s for panel in panels)
    for axes, panel in zip(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels, strict=True):
        _draw_panel(axes, panel, workers, shown, longest_s, _row_in(workers) > 0.2)
        axes.set_title(panel.title)
    axes.set_xlim(0, longest_s * 1.07)
    axes.tick_params(axis="x", length=3)
    axes.set_xlabel("seconds since the step began")
    modules = list(dict.fromkeys(worker.module for worker in workers))
    handles = [
        Patch(color=MODULE_SHADES.get(module, ("#bbb", "#444"))[shade], label=f"{module} {name}")
        for module in modules
        for shade, name in enumerate(("forward", "backward"))
    ]
    if any(_sync_is_visible(panel) for panel in panels):
        handles.append(Patch(color=_SYNC_COLOUR, label="gradient sync"))
    legend_beside_title(figure.axes[0], handles)
    note = (
        "Pale grey: waiting. Numbers are microbatches. Measured: each rank's clock starts at its own first instruction."
    )
    if len(shown) < len(workers):
        note += f" The first replicas of every stage are drawn ({len(shown)} of {len(workers)} workers)."
    heading(figure, finding, note)


def _boxes(rows: list[tuple]) -> pl.DataFrame:
    schema = {
        "worker": pl.Int64,
        "module": pl.String,
        "pass": pl.String,
        "microbatch": pl.Int64,
        "start_s": pl.Float64,
        "end_s": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _sync_is_visible(panel: StepPanel) -> bool:
    sync = panel.boxes.filter(pl.col("pass") == "sync")
    return len(sync) > 0 and (sync["end_s"] - sync["start_s"]).max() > panel.step_s / 1000


def _shown(workers: Sequence[Worker]) -> list[int]:
    """All workers, or as many replicas of every stage as leave the rows readable."""
    num_stages = len({(worker.module, worker.pp_stage) for worker in workers})
    most_replicas = max(1, _MOST_ROWS // num_stages)
    return [index for index, worker in enumerate(workers) if worker.dp_rank < most_replicas]


def _row_in(workers: Sequence[Worker]) -> float:
    return min(0.42, max(0.2, 2.0 / len(_shown(workers))))


def _draw_panel(
    axes: Axes, panel: StepPanel, workers: Sequence[Worker], shown: list[int], longest_s: float, is_roomy: bool
) -> None:
    row_of = {worker: row for row, worker in enumerate(shown)}
    half = 0.4
    axes.barh(range(len(shown)), panel.step_s, height=2 * half, color="#efefef", linewidth=0)
    for (worker, module, direction), frame in panel.boxes.group_by("worker", "module", "pass", maintain_order=True):
        if worker not in row_of:
            continue
        row = row_of[worker]
        is_backward = direction == "backward"
        colour = _SYNC_COLOUR if direction == "sync" else MODULE_SHADES.get(module, ("#bbb", "#444"))[is_backward]
        starts, ends = frame["start_s"].to_numpy(), frame["end_s"].to_numpy()
        corners = [
            [(start, row - half), (end, row - half), (end, row + half), (start, row + half)]
            for start, end in zip(starts, ends, strict=True)
        ]
        axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=0.5))
        if direction == "sync":
            continue
        for microbatch, start, end in zip(frame["microbatch"], starts, ends, strict=True):
            if (end - start) / longest_s > _DIGIT_SHARE * (len(str(microbatch)) + 0.6):
                axes.text(
                    (start + end) / 2,
                    row,
                    str(microbatch),
                    ha="center",
                    va="center_baseline",
                    fontsize=8 if is_roomy else 7,
                    color="white" if is_backward else INK,
                )
    axes.plot([panel.step_s] * 2, [-0.5, len(shown) - 0.5], color=INK, linewidth=1.2)
    axes.annotate(
        format_seconds(panel.step_s),
        (panel.step_s, (len(shown) - 1) / 2),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontweight="bold",
    )
    axes.set_ylim(len(shown) - 0.45, -0.55)
    axes.set_yticks(range(len(shown)), [_label(workers[index], workers) for index in shown])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _label(worker: Worker, workers: Sequence[Worker]) -> str:
    label = worker.module
    own = [other for other in workers if other.module == worker.module]
    if any(other.pp_stage for other in own):
        label += f" stage {worker.pp_stage}"
    if any(other.dp_rank for other in own):
        label += f" · dp {worker.dp_rank}"
    return label
