"""The plot of one step: when each worker computes which microbatch, as scheduled, with `random`, and as measured.

All panels have the same time axis and the same rows, one for each worker (ranks that act together). They show boxes,
given as a frame with the columns worker, module, chunk, pass, microbatch, start_s, end_s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dflop.parallelism import Plan
from dflop.pipeline import Timeline, nodes_of, stages_of, workers_of
from dflop.reporting.style import INK, MODULE_SHADES, MUTED, format_seconds, heading, legend_beside_title

__all__ = ["StepPanel", "draw_timeline", "measured_boxes", "predicted_boxes", "shown_workers", "timeline_height_in"]

_MOST_ROWS = 20
_SYNC_COLOUR = "#CC79A7"
_WEIGHT_COLOUR = "#6F7F3F"
_PASSES = ("forward", "backward", "weight")
# The approximate width of a digit, as a share of the time axis of a figure of 12.5 inches.
_DIGIT_SHARE = 0.0062


@dataclass(frozen=True, slots=True)
class StepPanel:
    """One panel: the step as predicted or measured, which ends at `step_s`. `title` says which, with main figures."""

    title: str
    boxes: pl.DataFrame
    step_s: float
    is_measured: bool = False


def predicted_boxes(plan: Plan, timeline: Timeline) -> pl.DataFrame:
    """The boxes of a simulated step. What a worker waits for its gradient syncs follows its last computation."""
    rows = []
    nodes, chunks = nodes_of(plan), _chunks(plan)
    for index, worker in enumerate(workers_of(plan)):
        own = list(worker.nodes)
        for node in own:
            for which, name in enumerate(_PASSES):
                for microbatch in np.flatnonzero(timeline.end_s[which, node] > timeline.start_s[which, node]):
                    ends = (float(table[which, node, microbatch]) for table in (timeline.start_s, timeline.end_s))
                    rows.append((index, nodes[node].module, chunks[node], name, int(microbatch), *ends))
        waits_s = float(timeline.computed_s[index]), float(timeline.synced_s[index])
        if waits_s[1] > waits_s[0]:
            rows.append((index, nodes[own[-1]].module, chunks[own[-1]], "sync", -1, *waits_s))
    return _boxes(rows)


def measured_boxes(plan: Plan, observations: pl.DataFrame) -> pl.DataFrame:
    """The boxes of one step's observations. Of a worker's ranks, which act together, the first is shown."""
    worker_of = {worker.first_rank: index for index, worker in enumerate(workers_of(plan))}
    place = {(node.module, node.pp_stage, node.dp_rank): number for number, node in enumerate(nodes_of(plan))}
    chunks = _chunks(plan)
    rows = []
    for row in observations.filter(pl.col("rank").is_in(list(worker_of))).iter_rows(named=True):
        node = place[row["module"], row["pp_stage"], row["dp_rank"]]
        times = (row["start_s"], row["start_s"] + row["seconds"])
        rows.append((worker_of[row["rank"]], row["module"], chunks[node], row["pass"], row["microbatch"], *times))
    return _boxes(rows)


def timeline_height_in(plan: Plan, num_panels: int) -> float:
    return 1.6 + num_panels * (0.45 + _row_in(plan) * len(shown_workers(plan)))


def draw_timeline(figure: Figure, panels: Sequence[StepPanel], plan: Plan, finding: str) -> None:
    """One panel below the other, in the order given."""
    rows = shown_workers(plan)
    longest_s = max(panel.step_s for panel in panels)
    for axes, panel in zip(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels, strict=True):
        _draw_panel(axes, panel, rows, longest_s, _row_in(plan) > 0.2, plan.num_chunks)
        axes.set_title(panel.title)
    axes.set_xlim(0, longest_s * 1.07)
    axes.tick_params(axis="x", length=3)
    axes.set_xlabel("seconds since the step began")
    legend_beside_title(figure.axes[0], _legend(plan, panels))
    note = (
        "Pale grey: waiting. Numbers are microbatches. Measured: each rank's clock starts at its own first instruction."
    )
    if plan.num_chunks > 1:
        note += " The LLM's later chunks are darker."
    num_workers = len(workers_of(plan))
    if len(rows) < num_workers:
        note += f" The first replicas of every stage are drawn ({len(rows)} of {num_workers} workers)."
    heading(figure, finding, note)


def _legend(plan: Plan, panels: Sequence[StepPanel]) -> list[Patch]:
    handles = [
        Patch(color=_shade(grid.module, name), label=f"{grid.module} {name}")
        for grid in plan.grids
        for name in ("forward", "backward")
    ]
    if any((panel.boxes["pass"] == "weight").any() for panel in panels):
        handles.append(Patch(color=_WEIGHT_COLOUR, label="weight gradients"))
    if any(_sync_is_visible(panel) for panel in panels):
        handles.append(Patch(color=_SYNC_COLOUR, label="gradient sync"))
    return handles


def _chunks(plan: Plan) -> list[int]:
    """For every node, the index of its chunk among the chunks of its ranks."""
    return [stage.pp_stage // plan.grid(stage.module).pp for stage in stages_of(plan) for _ in range(stage.dp)]


def _boxes(rows: list[tuple]) -> pl.DataFrame:
    schema = {
        "worker": pl.Int64,
        "module": pl.String,
        "chunk": pl.Int64,
        "pass": pl.String,
        "microbatch": pl.Int64,
        "start_s": pl.Float64,
        "end_s": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _sync_is_visible(panel: StepPanel) -> bool:
    sync = panel.boxes.filter(pl.col("pass") == "sync")
    return len(sync) > 0 and (sync["end_s"] - sync["start_s"]).max() > panel.step_s / 1000


def shown_workers(plan: Plan) -> dict[int, str]:
    """The labels of all workers, by index; if there are too many to read, only of each stage's first replicas."""
    nodes, workers = nodes_of(plan), workers_of(plan)
    owners = [[nodes[node] for node in worker.nodes] for worker in workers]
    # A worker belongs to the stage of the last module that it carries; for colocated ones that is the LLM.
    stages = [(own[-1].module, own[-1].pp_stage % plan.grid(own[-1].module).pp) for own in owners]
    most_replicas = max(1, _MOST_ROWS // len(set(stages)))
    rows, seen = {}, dict.fromkeys(stages, 0)
    for index, (own, (module, stage)) in enumerate(zip(owners, stages, strict=True)):
        seen[module, stage] += 1
        if seen[module, stage] > most_replicas:
            continue
        label = " + ".join(dict.fromkeys(node.module for node in own))
        if plan.grid(module).pp > 1:
            label += f" stage {stage}"
        if stages.count((module, stage)) > 1:
            label += f" · dp {own[-1].dp_rank}"
        rows[index] = label
    return rows


def _row_in(plan: Plan) -> float:
    return min(0.42, max(0.2, 2.0 / len(shown_workers(plan))))


def _shade(module: str, direction: str, chunk: int = 0, num_chunks: int = 1) -> tuple[float, float, float]:
    if direction == "sync":
        return to_rgb(_SYNC_COLOUR)
    colour = _WEIGHT_COLOUR
    if direction != "weight":
        colour = MODULE_SHADES.get(module, ("#bbb", "#444"))[direction == "backward"]
    darker = 1 - 0.35 * chunk / max(1, num_chunks - 1)
    return tuple(darker * part for part in to_rgb(colour))


def _draw_panel(
    axes: Axes, panel: StepPanel, rows: dict[int, str], longest_s: float, is_roomy: bool, num_chunks: int
) -> None:
    row_of = {worker: row for row, worker in enumerate(rows)}
    half = 0.4
    axes.barh(range(len(rows)), panel.step_s, height=2 * half, color="#efefef", linewidth=0)
    keys = ("worker", "module", "chunk", "pass")
    for (worker, module, chunk, direction), frame in panel.boxes.group_by(*keys, maintain_order=True):
        if worker not in row_of:
            continue
        row = row_of[worker]
        colour = _shade(module, direction, chunk, num_chunks)
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
                    color=INK if direction == "forward" else "white",
                )
    axes.plot([panel.step_s] * 2, [-0.5, len(rows) - 0.5], color=INK, linewidth=1.2)
    axes.annotate(
        format_seconds(panel.step_s),
        (panel.step_s, (len(rows) - 1) / 2),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontweight="bold",
    )
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), list(rows.values()))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
