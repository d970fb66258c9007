"""Runs as files, with all that a report reads: made up, small, the same every time."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import yaml

from dflop.config import load_config
from dflop.plan import Grid, Plan
from dflop.report import plot_shapes, write_report
from dflop.report.schedules import replay
from dflop.schedule import preview_frames
from dflop.schedule.service import open_scheduler
from dflop.step import nodes_of
from dflop.store import (
    CORRECTIONS_SCHEMA,
    LEFT_OUT_SCHEMA,
    SHARD_SCHEMA,
    ShardFile,
    write_observations,
    write_shapes,
)
from dflop.train.observations import Observations
from dflop.train.step_seconds import PARTS, seconds_frame

CREATED = {"created": "2025-01-01T00:00:00+00:00"}
VERDICT = "The loaders bound this run: rank 1 waited 20% of each step for data; raise `train.loader_workers`"
SUMMARY = {
    "final_loss": 2.5,
    "train_s": 7200.0,
    "time_split": {"bound_by": VERDICT},
    "peak_memory_bytes": {"llm": 2**30},
}
SMALL = Plan(
    placement="disjoint",
    grids=(Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=1, rank_offset=1)),
    num_microbatches=4,
)
WIDE = Plan(
    placement="disjoint",
    grids=(Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=6, pp=2, rank_offset=2)),
    num_microbatches=4,
)


class Reported(NamedTuple):
    """A run's folder and what was written into its `report`."""

    folder: Path
    paths: list[Path]


def report_of(folder, plan, name="report", **cluster):
    plot_shapes(folder / "shapes.duckdb", folder / name / "shapes.svg")
    return Reported(folder, write_report(config_of(plan, **cluster), folder, folder / name))


def make_run(
    folder,
    write_costs,
    *,
    plan=SMALL,
    modalities=("image", "text", "video"),
    num_rejects=0,
    num_steps=12,
    predicted_in_training=1.0,
    detail="made up",
    source="train",
):
    """All that a report reads."""
    folder.mkdir(exist_ok=True)
    make_shapes(folder, modalities, num_rejects, detail=detail, source=source)
    write_costs(folder / "costs.duckdb", noise=0.05)
    (folder / "plan.yaml").write_text(yaml.safe_dump(what_is_said_of(plan)))
    make_candidates(plan, 5).write_parquet(folder / "candidates.parquet")
    scheduler = scheduler_of(folder, plan)
    preview, *_ = preview_frames([scheduler.schedule(step) for step in range(3)], nodes_of(plan))
    preview.write_parquet(folder / "schedule.parquet")
    make_training(folder / "train", scheduler, num_steps, predicted_in_training)
    return folder


def what_is_said_of(plan):
    """All of a `plan.yaml`: a step of half a second, one baseline that is slower and one that does not fit."""
    predicted = {"step_s": 0.5, "idle": 0.1, "memory_bytes": {"vision": 2 * 10**8, "llm": 6 * 10**8}}
    slower = {"name": "monolithic, random batches (Megatron-style)", "step_s": 0.75, "would_take": "1.500x as long"}
    slower |= {"over_batches": [1.25, 1.75], "idle": 0.3, "memory_bytes": 7 * 10**8, "plan": "monolithic: all"}
    return {
        "plan": plan.to_dict(),
        "predicted": predicted | {"bottleneck": "llm compute", "num_batches": 16, "extrapolated": 0.0},
        "why": "It is short.",
        "next": "bound by llm compute; only faster or more devices shorten it",
        "baselines": [slower, {"name": "a rule", "why_not": "nothing of the kind fits into memory"}],
        "num_plans": 217,
    }


def config_of(plan, **cluster):
    return load_config(
        {
            "data": {"sources": [{"path": "train.json"}]},
            "cluster": {"devices_per_node": plan.world_size, **cluster},
            "schedule": {"policy": "lpt"},
        }
    )


def scheduler_of(folder, plan):
    names = {"shapes": "shapes.duckdb", "costs": "costs.duckdb", "plan": "plan.yaml"}
    return open_scheduler(config_of(plan), **{name: folder / file for name, file in names.items()})


def make_shapes(folder, modalities, num_rejects, num_samples=60, detail="made up", source="train"):
    rng = np.random.default_rng(0)
    rows = []
    for index in range(num_samples + num_rejects):
        modality = modalities[index % len(modalities)]
        num_items = 0 if modality == "text" else int(rng.integers(1, 32))
        text_tokens = int(rng.integers(20, 200))
        rejected = index >= num_samples
        rows.append(
            dict.fromkeys(SHARD_SCHEMA, 0)
            | {
                "row": index,
                "sample_id": f"{modality}-{index}",
                "modality": modality,
                "audio_s": 0.0,
                "num_items": num_items,
                "vision_tokens": 10 * num_items,
                "kept_vision_tokens": 10 * num_items,
                "text_tokens": text_tokens,
                "target_tokens": text_tokens // 2,
                "llm_tokens": text_tokens + 10 * num_items,
                "truncated": False,
                "reason": ("missing_media", "too_long")[index % 2] if rejected else None,
                "detail": detail if rejected else None,
            }
        )
    shard = folder / "shard.parquet"
    pl.DataFrame(rows, schema=SHARD_SCHEMA).write_parquet(shard)
    sources = pl.DataFrame(
        [{"name": source, "path": "p", "media_root": "m", "sampling": "all", "digest": "d", "num_records": len(rows)}]
    )
    files = [ShardFile(shard, "shard", source, 0, 0)]
    write_shapes(folder / "shapes.duckdb", files, sources, CREATED, sampled_rows={}, keep_duplicates=False)


def make_candidates(plan, count):
    """`plan` first, then the same grids with other numbers of microbatches, ever slower."""
    grids = {f"{grid.module}_{name}": getattr(grid, name) for grid in plan.grids for name in ("tp", "pp", "dp")}
    bounds = ("llm compute", "vision compute", "bubble")
    rows = [
        {"rank": place + 1, "placement": plan.placement, **grids}
        | {"num_microbatches": plan.num_microbatches + place, "checkpointing": False, "schedule": plan.schedule}
        | {"step_s": 0.5 + 0.03 * place, "idle": 0.1 + 0.01 * place}
        | {"vision_memory_bytes": 2e8 + 1e7 * place, "llm_memory_bytes": 6e8, "bottleneck": bounds[place % 3]}
        | {"num_batches": 16, "num_chunks": plan.num_chunks, "llm_layers": None}
        for place in range(count)
    ]
    return pl.DataFrame(rows)


def make_training(folder, scheduler, num_steps, predicted):
    """A training that takes one and a half times what was predicted; `predicted` scales what its trainer foresaw."""
    (folder / "observations").mkdir(parents=True)
    if predicted == 1:
        Observations(folder / "observations", 0, ()).keep_schedule(scheduler.schedule(num_steps // 2))
    lines, rows = [], []
    nodes = scheduler.pricer.nodes
    for step in range(num_steps):
        schedule = scheduler.schedule(step)
        times, timeline = replay(scheduler, schedule)
        for index, node in enumerate(nodes):
            for direction, name in enumerate(("forward", "backward")):
                for microbatch in range(schedule.forward_s.shape[1]):
                    seconds = (times.forward_s, times.backward_s)[direction][index, microbatch]
                    start_s = timeline.start_s[direction, index, microbatch]
                    rows.append(
                        {"step": step, "rank": index, "module": node.module, "pp_stage": node.pp_stage}
                        | {"dp_rank": node.dp_rank, "microbatch": microbatch, "pass": name}
                        | {"start_s": 1.5 * start_s, "seconds": 1.5 * seconds}
                        | {"predicted_s": predicted * seconds, "warmup": step < 2}
                    )
        lines.append(
            {"step": step, "loss": 5.0 - 0.1 * step, "num_samples": 16, "num_tokens": int(schedule.llm_tokens.sum())}
            | {
                "step_s": 1.6 * predicted * schedule.step_s,
                "pipeline_s": 1.5 * predicted * schedule.step_s,
                "predicted_step_s": predicted * schedule.step_s,
            }
            | {"idle": schedule.idle, "predicted_idle": schedule.idle, "wait_s": 0.0, "policy": "lpt"}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    nothing = (schema.to_frame() for schema in (CORRECTIONS_SCHEMA, LEFT_OUT_SCHEMA))
    # Of every step an eighth goes into each part.
    parts = np.full((scheduler.pricer.plan.world_size, len(PARTS)), 1 / len(PARTS))
    seconds = [seconds_frame(step, parts, 1.0, warmup=step < 2) for step in range(num_steps)]
    write_observations(folder / "observations.duckdb", pl.DataFrame(rows), *nothing, pl.concat(seconds), CREATED)
