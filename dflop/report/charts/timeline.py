"""One step: when each worker computes which microbatch, as scheduled, with `random`, and as measured.

All panels have the same time axis and the same rows, one for each worker (ranks that act together).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import polars as pl

from dflop.plan import Plan
from dflop.report.boxes import StepPanel, shown_workers
from dflop.report.facts import Facts
from dflop.report.picture import Panel, Picture, hover, kind, layer, names, number, rows
from dflop.report.style import colour, format_seconds, module_colour
from dflop.schedule import StepSchedule
from dflop.step import workers_of

__all__ = ["draw", "draw_timeline"]

_FOREIGN = "; the run was trained by another plan or other costs"
# An interval of seconds: drawn, it moves; the wheel zooms where Ctrl is held, and scrolls the page where it is not.
_ZOOM = {
    "name": "zoom",
    "bind": "scales",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.ctrlKey || event.metaKey]"},
}
# A box's microbatch, where its digits have room.
_NUMBER = (
    "datum.microbatch && scale('x', datum.end_s) - scale('x', datum.start_s) > 8 + 6 * length(datum.microbatch)"
    " ? datum.microbatch : ''"
)
_DIRECTIONS = ("forward", "backward")


def draw(facts: Facts) -> Picture:
    return draw_timeline(facts.shown.panels, facts.run.plan, facts.shown.finding + _FOREIGN * facts.is_foreign)


def draw_timeline(panels: Sequence[StepPanel], plan: Plan, finding: str) -> Picture:
    """One panel below the other, in the order given."""
    shown, num_workers = shown_workers(plan), len(workers_of(plan))
    note = "Grey: waiting. Numbers are microbatches. Measured: each rank's clock starts at its own first instruction."
    if plan.num_chunks > 1:
        note += " The LLM's later chunks are paler."
    if len(shown) < num_workers:
        note += f" The first replicas of every stage are drawn ({len(shown)} of {num_workers} workers)."
    colours = {f"{grid.module} {name}": module_colour(grid.module, name) for grid in plan.grids for name in _DIRECTIONS}
    colours["gradient sync"] = colour("sync")
    tables = [_boxes(panel, shown, plan.num_chunks) for panel in panels]
    present: set[str] = set()
    for panel, table in zip(panels, tables, strict=True):
        visible = pl.col("end_s") - pl.col("start_s") > panel.step_s / 1000
        present |= set(table.filter(visible)["what"])
    colours = {label: shade for label, shade in colours.items() if label in present}
    longest_s = max(panel.step_s for panel in panels)
    x = number("start_s", scale={"domain": [0, 1.02 * longest_s]}, axis={"grid": False, "format": "~g"})
    height = len(shown) * (17 if len(shown) > 12 else 24)
    drawn = []
    for panel, table in zip(panels, tables, strict=True):
        # The legend stands above the first panel, the title of the axis below the last.
        hue = kind("what", colours, **({"legend": None} if drawn else {}))
        title = {"title": "seconds since the step began"} if panel is panels[-1] else {}
        view = _view(table, list(shown.values()), panel.step_s, x | title, hue)
        drawn.append(Panel(title=panel.title, view=view, height=height))
    return Picture(section="step", finding=finding, note=note, panels=drawn)


def _boxes(panel: StepPanel, shown: dict[int, str], num_chunks: int) -> pl.DataFrame:
    """The boxes that are drawn, with what is said of them."""
    loads = _loads(panel.schedule)
    table = []
    for worker, module, replica, chunk, direction, microbatch, start_s, end_s in panel.boxes.rows():
        label = "gradient sync" if direction == "sync" else f"{module} {direction}"
        computes = label if direction == "sync" else f"{module} {direction} of microbatch {microbatch}"
        opacity = 1 - 0.4 * chunk / max(1, num_chunks - 1)
        takes = f"{format_seconds(end_s - start_s)}, from {format_seconds(start_s) if start_s else '0'} on"
        words = (shown.get(worker), label, str(microbatch) if microbatch >= 0 else "", computes, takes)
        if worker in shown:
            table.append((*words, loads.get((module, replica, microbatch), ""), opacity, start_s, end_s))
    texts = dict.fromkeys(("worker", "what", "microbatch", "computes", "takes", "holds"), pl.String)
    numbers = dict.fromkeys(("opacity", "start_s", "end_s"), pl.Float64)
    return pl.DataFrame(table, schema=texts | numbers, orient="row")


def _loads(schedule: StepSchedule | None) -> dict[tuple[str, int, int], str]:
    """By (module, replica, microbatch), in words: its samples, and the tokens or items that are computed."""
    if schedule is None:
        return {}
    counts: Counter[tuple[str, int, int]] = Counter()
    sizes: Counter[tuple[str, int, int]] = Counter()
    for place, microbatch in enumerate(schedule.microbatch):
        parts = [("llm", schedule.llm_dp_rank[place], schedule.llm_tokens[place])]
        for index, encoder in enumerate(schedule.encoders):
            parts.append((encoder, schedule.encoder_rank[place, index], schedule.num_items[place, index]))
        for module, replica, size in parts:
            if module == "llm" or size:
                counts[module, int(replica), int(microbatch)] += 1
                sizes[module, int(replica), int(microbatch)] += int(size)
    return {
        key: f"{count} sample{'s' * (count > 1)}, {sizes[key]:,} {'tokens' if key[0] == 'llm' else 'items'}"
        for key, count in counts.items()
    }


def _view(
    table: pl.DataFrame, workers: list[str], step_s: float, x: dict[str, Any], hue: dict[str, Any]
) -> dict[str, Any]:
    """One panel; `x` and `hue` are the encodings of the time and of the colours."""
    y = names("worker", scale={"domain": workers})
    look = {"clip": True, "height": {"band": 0.84}}
    waiting = pl.DataFrame({"worker": workers, "start_s": 0.0, "end_s": step_s})
    boxes = look | {"stroke": colour("page"), "strokeWidth": 0.5}
    said = hover(worker="", computes="", takes="", holds="")
    shade = number("opacity", scale=None)
    is_strong = {"test": "indexof(datum.what, 'forward') < 0", "value": "#ffffff"}
    middle = {"calculate": "(datum.start_s + datum.end_s) / 2", "as": "middle_s"}
    inks = {"condition": is_strong, "value": colour("ink")}
    text = layer("text", look={"clip": True, "text": {"expr": _NUMBER}}, x=x | {"field": "middle_s"}, y=y, color=inks)
    end = {"values": [{"start_s": step_s}]}
    return {
        "data": rows(table),
        "layer": [
            layer("rect", look=look | {"color": colour("wait")}, data=rows(waiting), x=x, x2="end_s", y=y)
            | {"params": [_ZOOM]},
            layer("rect", look=boxes, x=x, x2="end_s", y=y, opacity=shade, color=hue, tooltip=said),
            text | {"transform": [middle]},
            layer("rule", look={"clip": True, "color": colour("ink"), "strokeWidth": 1.5}, data=end, x=x),
        ],
    }
