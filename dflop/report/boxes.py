"""The boxes of one step: when each worker (ranks that act together) computes which microbatch, predicted or measured.

Boxes are a frame with the columns worker, module, replica, chunk, pass, microbatch, start_s, end_s.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from dflop.plan import Plan
from dflop.schedule import StepSchedule
from dflop.step import Timeline, nodes_of, stages_of, workers_of

__all__ = ["StepPanel", "measured_boxes", "predicted_boxes", "shown_workers"]

_MOST_ROWS = 20
_PASSES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class StepPanel:
    """One panel: the step as predicted or measured, which ends at `step_s`. `title` says which, with main figures;
    `schedule` is what the boxes carry out, if that is known."""

    title: str
    boxes: pl.DataFrame
    step_s: float
    schedule: StepSchedule | None = None


def predicted_boxes(plan: Plan, timeline: Timeline) -> pl.DataFrame:
    """The boxes of a simulated step. What a worker waits for its gradient syncs follows its last computation."""
    rows = []
    nodes, chunks = nodes_of(plan), _chunks(plan)
    for index, worker in enumerate(workers_of(plan)):
        for node in worker.nodes:
            for direction, name in enumerate(_PASSES):
                for microbatch in np.flatnonzero(timeline.end_s[direction, node] > timeline.start_s[direction, node]):
                    ends = (float(table[direction, node, microbatch]) for table in (timeline.start_s, timeline.end_s))
                    rows.append(
                        (index, nodes[node].module, nodes[node].dp_rank, chunks[node], name, int(microbatch), *ends)
                    )
        waits_s = float(timeline.computed_s[index]), float(timeline.synced_s[index])
        if waits_s[1] > waits_s[0]:
            last = worker.nodes[-1]
            rows.append((index, nodes[last].module, nodes[last].dp_rank, chunks[last], "sync", -1, *waits_s))
    return _boxes(rows)


def measured_boxes(plan: Plan, observations: pl.DataFrame) -> pl.DataFrame:
    """The boxes of one step's observations. Of a worker's ranks, which act together, the first is shown."""
    worker_of = {worker.first_rank: index for index, worker in enumerate(workers_of(plan))}
    place = {(node.module, node.pp_stage, node.dp_rank): number for number, node in enumerate(nodes_of(plan))}
    chunks = _chunks(plan)
    rows = []
    for row in observations.filter(pl.col("rank").is_in(list(worker_of))).iter_rows(named=True):
        chunk = chunks[place[row["module"], row["pp_stage"], row["dp_rank"]]]
        box = (row["module"], row["dp_rank"], chunk, row["pass"], row["microbatch"])
        rows.append((worker_of[row["rank"]], *box, row["start_s"], row["start_s"] + row["seconds"]))
    return _boxes(rows)


def _chunks(plan: Plan) -> list[int]:
    """For every node, the index of its chunk among the chunks of its ranks."""
    return [stage.pp_stage // plan.grid(stage.module).pp for stage in stages_of(plan) for _ in range(stage.dp)]


def _boxes(rows: list[tuple]) -> pl.DataFrame:
    schema = {
        "worker": pl.Int64,
        "module": pl.String,
        "replica": pl.Int64,
        "chunk": pl.Int64,
        "pass": pl.String,
        "microbatch": pl.Int64,
        "start_s": pl.Float64,
        "end_s": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def shown_workers(plan: Plan) -> dict[int, str]:
    """The labels of all workers, by index; if there are too many to read, only of each stage's first replicas."""
    nodes, workers = nodes_of(plan), workers_of(plan)
    carried = [[nodes[node] for node in worker.nodes] for worker in workers]
    # A worker belongs to the stage of the last module that it carries; for colocated ones that is the LLM.
    stages = [(stack[-1].module, stack[-1].pp_stage % plan.grid(stack[-1].module).pp) for stack in carried]
    most_replicas = max(1, _MOST_ROWS // len(set(stages)))
    rows, seen = {}, dict.fromkeys(stages, 0)
    for index, (stack, (module, stage)) in enumerate(zip(carried, stages, strict=True)):
        seen[module, stage] += 1
        if seen[module, stage] > most_replicas:
            continue
        label = " + ".join(dict.fromkeys(node.module for node in stack))
        if plan.grid(module).pp > 1:
            label += f" stage {stage}"
        if stages.count((module, stage)) > 1:
            label += f" · dp {stack[-1].dp_rank}"
        rows[index] = label
    return rows
