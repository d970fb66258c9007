"""The page's timeline: the boxes of one step's panels as plain numbers, for the script that draws it."""

from collections import Counter
from typing import Any

from dflop.parallelism import Plan
from dflop.pipeline import nodes_of, workers_of
from dflop.reporting.steps import StepShown
from dflop.reporting.timeline import StepPanel, shown_workers
from dflop.scheduling import StepSchedule

__all__ = ["timeline_numbers"]

_PASSES = ("forward", "backward", "weight", "sync")
# Seconds are rounded to microseconds.
_DIGITS = 6


def timeline_numbers(plan: Plan, shown: StepShown) -> dict[str, Any]:
    """What the script draws: rows, passes and modules, and for each panel its boxes, [row, module, chunk, pass,
    microbatch, start, end] with the times in seconds."""
    rows = shown_workers(plan)
    modules = [grid.module for grid in plan.grids]
    row_of = {worker: row for row, worker in enumerate(rows)}
    return {
        "rows": list(rows.values()),
        "modules": modules,
        "passes": _PASSES,
        "num_chunks": plan.num_chunks,
        "replicas": _replicas(plan, row_of),
        "loads": _loads(shown.schedule, modules),
        "panels": [_panel(panel, row_of, modules, has_loads=panel is not shown.panels[1]) for panel in shown.panels],
    }


def _panel(panel: StepPanel, row_of: dict[int, int], modules: list[str], *, has_loads: bool) -> dict[str, Any]:
    """One panel. `has_loads` is false if its assignment is not the scheduled one, so that loads do not apply."""
    kinds = {"backward_input": "backward", "backward_weight": "weight"}
    boxes = [
        [
            row_of[worker],
            modules.index(module),
            chunk,
            _PASSES.index(kinds.get(direction, direction)),
            microbatch,
            round(start_s, _DIGITS),
            round(end_s, _DIGITS),
        ]
        for worker, module, chunk, direction, microbatch, start_s, end_s in panel.boxes.rows()
        if worker in row_of
    ]
    return {
        "title": panel.title,
        "measured": panel.is_measured,
        "step_s": panel.step_s,
        "boxes": boxes,
        "has_loads": has_loads and "not the assignment" not in panel.title,
    }


def _replicas(plan: Plan, row_of: dict[int, int]) -> list[dict[str, int]]:
    """For each row, the replica of each module that it carries."""
    nodes, workers = nodes_of(plan), workers_of(plan)
    return [{nodes[node].module: nodes[node].dp_rank for node in workers[worker].nodes} for worker in row_of]


def _loads(schedule: StepSchedule, modules: list[str]) -> dict[str, list[int]]:
    """By "module/replica/microbatch": the number of samples, and of the tokens or items that are computed."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for place, microbatch in enumerate(schedule.microbatch):
        key = f"llm/{schedule.llm_dp_rank[place]}/{microbatch}"
        counts[key] += 1
        sizes[key] += int(schedule.llm_tokens[place])
        for number, encoder in enumerate(schedule.encoders):
            if encoder in modules and (items := int(schedule.num_items[place, number])):
                key = f"{encoder}/{schedule.encoder_rank[place, number]}/{microbatch}"
                counts[key] += 1
                sizes[key] += items
    return {key: [count, sizes[key]] for key, count in counts.items()}
