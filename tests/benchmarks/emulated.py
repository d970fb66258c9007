"""The emulated cluster against the simulator: `dflop train --emulate` for every placement and schedule on eight ranks.

    python tests/benchmarks/emulated.py --shapes FOLDER [--steps 50] [--step-s 0.5] [--only NAME]

Of each plan, its eight ranks carry out the instruction lists of training over gloo, asleep where they would compute,
with the schedules of the service beside them; once with our policy and once with random groups. FOLDER, the mix and the
analytic costs are `planner.py`'s, of a 7B on H200s; all seconds are multiplied so that the mean predicted step takes
`--step-s`. Printed is the median of emulated over simulated steps, the whole step and its pipeline alone;
`results/benchmarks/emulated.json` has each run's summary.
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


PLANS = {
    "disjoint, 1f1b": disjoint(),
    "disjoint, interleaved": disjoint(schedule="interleaved_1f1b", num_chunks=2),
    "colocated, 1f1b": shared("colocated"),
    "colocated, interleaved": shared("colocated", schedule="interleaved_1f1b", num_chunks=2),
    "bubble-filled, 1f1b": shared("bubble_filled"),
    "monolithic, 1f1b": shared("monolithic"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--step-s", type=float, default=0.5, help="what the mean step shall take")
    parser.add_argument("--only", default="", help="plans whose name has this in it")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores: python {' '.join(sys.argv)}\n", flush=True)
    summaries = {}
    planner.DEVICE = DEVICE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planner.write_artifacts(arguments.shapes, folder, PRESET)
        for name, plan in PLANS.items():
            for policy in POLICIES if arguments.only in name else ():
                summary = emulate(folder, plan, policy, arguments)
                step, pipeline = summary["measured_over_predicted"], summary["pipeline_over_predicted"]
                print(
                    f"{name:<24} {policy:<8} {plan.world_size} ranks   emulated over simulated: median "
                    f"{step['median']:.3f}, from {step['least']:.3f} to {step['most']:.3f}; the pipeline alone "
                    f"{pipeline['median']:.3f}",
                    flush=True,
                )
                summaries[f"{name}, {policy}"] = summary
    out = Path("results/benchmarks/emulated.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"command": " ".join(sys.argv), "runs": summaries}, indent=2) + "\n")


def emulate(folder: Path, plan: Plan, policy: str, arguments: argparse.Namespace) -> dict:
    """The summary of one emulated run."""
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"plan": plan.to_dict()}))
    more = {"schedule": {"policy": policy}, "train": {"steps": NUM_WARMUP + arguments.steps}}
    inputs = ["--config", planner.write_config(folder, PRESET, plan.world_size, BATCH_SIZE), "--config"]
    inputs += [json.dumps(more), "--shapes", folder / f"{PRESET}.shapes.duckdb", "--plan"]
    costs = folder / f"{PRESET}.costs.duckdb"
    preview = folder / "preview.parquet"
    planner.dflop("schedule", *inputs, path, "--costs", costs, "--out", preview)
    mean_s = pl.read_parquet(folder / "preview_steps.parquet")["step_s"].mean()
    scale = ["--emulate-scale", arguments.step_s / mean_s]
    planner.dflop("train", *inputs, path, "--emulate", costs, *scale, "--out", folder / "emulated")
    return json.loads((folder / "emulated/summary.json").read_text())


if __name__ == "__main__":
    main()
