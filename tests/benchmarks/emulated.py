"""The emulated cluster against the simulator: `dflop train --emulate` for every placement and schedule on eight ranks.

    python tests/benchmarks/emulated.py --shapes FOLDER [--steps 50] [--step-s 0.5] [--only NAME] [--artifacts FOLDER]

Of each plan, its eight ranks carry out the instruction lists of training over gloo, asleep where they would compute,
with the schedules of the service beside them; once with our policy and once with random groups. FOLDER, the mix and the
analytic costs are `planner.py`'s, of a 7B on H200s; all seconds are multiplied so that the mean predicted step takes
`--step-s`. Printed is the median of emulated over simulated steps, the whole step and its pipeline alone;
`results/benchmarks/emulated.json` has each run's summary.

Plans whose replicas share long samples (`--only over`) get batches of 64 of which 5 % are long clips. `mixed` is the
part of their buckets that has a share and a whole sample. They run with our policy alone: the other shares none.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import planner
import polars as pl
import regret
import yaml

from dflop.plan import Grid, Plan

PRESET = "llava_ov_7b"
# Two samples a microbatch, which these devices hold without checkpointing.
BATCH_SIZE, DEVICE = 16, "h200-141g"
POLICIES = ("search", "random")
# Steps that are not counted: processes load code in their first.
NUM_WARMUP = 2


def disjoint(**more) -> Plan:
    grids = (Grid(module="vision", num_ranks=4), Grid(module="llm", num_ranks=4, pp=4, rank_offset=4))
    return Plan(placement="disjoint", grids=grids, num_microbatches=8, **more)


def shared(placement: str, **more) -> Plan:
    encoder_ranks = 2 if placement == "monolithic" else 8
    grids = (Grid(module="vision", num_ranks=encoder_ranks), Grid(module="llm", num_ranks=8, pp=4))
    return Plan(placement=placement, grids=grids, num_microbatches=8, **more)


def over(cp: int, pp: int, placement: str = "monolithic") -> Plan:
    """Up to `cp` replicas compute a sample. Clips of 64k tokens fit where layers are recomputed."""
    dp = (4 if placement == "disjoint" else 8) // pp
    vision = Grid(module="vision", num_ranks={"monolithic": dp, "disjoint": 4, "colocated": 8}[placement])
    llm = Grid(module="llm", num_ranks=dp * pp, pp=pp, cp=cp, rank_offset=4 if placement == "disjoint" else 0)
    return Plan(placement=placement, grids=(vision, llm), num_microbatches=4, checkpointing=True)


PLANS = {
    "disjoint, 1f1b": disjoint(),
    "disjoint, interleaved": disjoint(schedule="interleaved_1f1b", num_chunks=2),
    "colocated, 1f1b": shared("colocated"),
    "colocated, interleaved": shared("colocated", schedule="interleaved_1f1b", num_chunks=2),
    "bubble-filled, 1f1b": shared("bubble_filled"),
    "monolithic, 1f1b": shared("monolithic"),
}
SHARING = {
    "over 2, pp 1": over(2, 1),
    "over 4, pp 1": over(4, 1),
    "over 2, pp 2": over(2, 2),
    "over 4, pp 2": over(4, 2),
    "over 2, pp 2, disjoint": over(2, 2, "disjoint"),
    "over 2, pp 2, colocated": over(2, 2, "colocated"),
}
# Of these plans: the mix, and the samples of a batch.
SHARED_MIX, SHARED_BATCH_SIZE = "clips 5 %", 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--step-s", type=float, default=0.5, help="what the mean step shall take")
    parser.add_argument("--only", default="", help="plans whose name has this in it")
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs in")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores: python {' '.join(sys.argv)}\n", flush=True)
    summaries = {}
    planner.DEVICE = DEVICE
    with tempfile.TemporaryDirectory() as name:
        folder = planner.folder_with_costs(PRESET, arguments.artifacts or Path(name))
        for plans, policies, batch_size, mix in (
            (PLANS, POLICIES, BATCH_SIZE, "ordinary"),
            (SHARING, POLICIES[:1], SHARED_BATCH_SIZE, SHARED_MIX),
        ):
            plans = {name: plan for name, plan in plans.items() if arguments.only in name}
            if plans:
                planner.SHARES = regret.MIXES[mix]
                planner.write_mix(arguments.shapes, folder, PRESET)
            for name, plan in plans.items():
                for policy in policies:
                    summaries[f"{name}, {policy}"] = summary = emulate(folder, plan, policy, batch_size, arguments)
                    print_line(name, plan, policy, summary)
    out = Path("results/benchmarks/emulated.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"command": " ".join(sys.argv), "runs": summaries}, indent=2) + "\n")


def print_line(name: str, plan: Plan, policy: str, summary: dict) -> None:
    step, pipeline = summary["measured_over_predicted"], summary["pipeline_over_predicted"]
    mixed = f"; mixed {summary['mixed']:.0%}" if plan.grid("llm").cp > 1 else ""
    print(
        f"{name:<24} {policy:<8} {plan.world_size} ranks   emulated over simulated: median {step['median']:.3f}, from "
        f"{step['least']:.3f} to {step['most']:.3f}; the pipeline alone {pipeline['median']:.3f}{mixed}",
        flush=True,
    )


def emulate(folder: Path, plan: Plan, policy: str, batch_size: int, arguments: argparse.Namespace) -> dict:
    """The summary of one emulated run."""
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"plan": plan.to_dict()}))
    more = {"schedule": {"policy": policy}, "train": {"steps": NUM_WARMUP + arguments.steps}}
    inputs = ["--config", planner.write_config(folder, PRESET, plan.world_size, batch_size), "--config"]
    inputs += [json.dumps(more), "--shapes", folder / f"{PRESET}.shapes.duckdb", "--plan"]
    costs = folder / f"{PRESET}.costs.duckdb"
    preview = folder / "preview.parquet"
    planner.dflop("schedule", *inputs, path, "--costs", costs, "--out", preview)
    mean_s = pl.read_parquet(folder / "preview_steps.parquet")["step_s"].mean()
    scale = ["--emulate-scale", arguments.step_s / mean_s]
    planner.dflop("train", *inputs, path, "--emulate", costs, *scale, "--out", folder / "emulated")
    buckets = pl.read_parquet(preview).group_by("step", "llm_dp_rank", "microbatch")
    kinds = buckets.agg((pl.col("degree") > 1).any().alias("shared"), (pl.col("degree") == 1).any().alias("whole"))
    mixed = kinds.select((pl.col("shared") & pl.col("whole")).mean()).item()
    return json.loads((folder / "emulated/summary.json").read_text()) | {"mixed": mixed}


if __name__ == "__main__":
    main()
