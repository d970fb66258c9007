"""How much faster the best plan would train than the plan that `dflop plan` chooses, in simulation.

    python tests/benchmarks/regret.py --shapes FOLDER [--only TEXT] [--artifacts FOLDER]

Mixes: `planner.py`'s, the same with 5 % or 50 % clips of 64k tokens, pictures, and videos. Models are a 7B with a
SigLIP and Qwen2.5-VL 7B, on 8 and 64 H100s. For each, the chosen plan is scheduled as in training, on batches that the
search has not seen. Beside it stand the search's other fast plans and simple recipes: all devices hold all modules,
with any number of microbatches up to 12, shards in each node, in two nodes or in all, and tp up to 2. The recipes that
are fastest with quick batches or with batches dealt by length are scheduled, too, with twenty times the trials.

- *regret*: how much longer the chosen plan's steps are than those of the best plan with twenty times the trials;
- *trials*: the part of it that the chosen plan would gain by twenty times the trials;
- *order*: the rest, which another plan brings.

All steps are predicted, from analytic costs. `--artifacts` keeps costs and samples for the next run.
`results/benchmarks/regret.json` has the plans.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import planner

from dflop.balance import BY_LENGTH, LPT
from dflop.base import UserError
from dflop.config import Config, ScheduleConfig
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import Grid, Plan
from dflop.schedule import BatchScheduler, GlobalBatches
from dflop.search import (
    GroupedBatches,
    PlanPricer,
    leave_out_what_no_plan_holds,
    pricer_of,
    search_plans,
    with_finalists_scheduled,
)
from dflop.search.recompute import JustEnough
from dflop.shapes import SampleShapes

FAMILIES = {"llava_ov_7b": "llava_onevision", "qwen2_5_vl_7b": "qwen2_5_vl"}
SIZES = ((8, 64), (64, 512))
MIXES = {
    "ordinary": planner.SHARES,
    "5 % clips": {"clip": 0.05} | {kind: 0.95 * share for kind, share in planner.SHARES.items()},
    "50 % clips": {"clip": 0.5} | {kind: 0.5 * share for kind, share in planner.SHARES.items()},
    "pictures": {"image": 0.3, "multi_image": 0.7},
    "videos": {"video": 1.0},
}
NUM_SAMPLES, TP_SIZES = 16_384, (1, 2)
NUM_BATCHES, SEED_OF_BATCHES = 2, 1000
MOST_MICROBATCHES, NUM_FOUND, NUM_RECIPES = 12, 6, 6
DEFAULT = ScheduleConfig(policy="search")
THOROUGH = replace(DEFAULT, search_trials=20 * DEFAULT.search_trials)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs and samples in")
    arguments = parser.parse_args()
    command = " ".join(["python", *sys.argv])
    print(f"{platform.machine()}, {os.cpu_count()} cores: {command}\n")
    print(f"{'':38}{'search':>8}{'step':>9}{'regret':>8}{'trials':>8}{'order':>8}")
    planner.FAMILIES |= FAMILIES
    planner.NUM_SAMPLES, planner.TP_SIZES = NUM_SAMPLES, TP_SIZES
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, inputs in cases(arguments.shapes, arguments.artifacts or Path(temporary), arguments.only):
            rows.append({"case": name} | regret(*inputs))
            print_row(rows[-1])
    if rows:
        regrets = [row["regret"] for row in rows]
        print(f"\nregret: largest {max(regrets):.2%}, mean {np.mean(regrets):.2%}")
    out = planner.REPOSITORY / "results/benchmarks/regret.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"command": command, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def cases(tables: Path, artifacts: Path, only: str) -> Iterator[tuple[str, tuple]]:
    """The name of each case, and what `search_plans` takes."""
    for preset in FAMILIES:
        for mix, shares in MIXES.items():
            for num_devices, batch_size in SIZES:
                name = f"{preset}, {num_devices} devices, {mix}"
                if only not in name:
                    continue
                folder = artifacts / mix
                folder.mkdir(parents=True, exist_ok=True)
                if not (artifacts / f"{preset}.costs.duckdb").exists():
                    planner.write_costs(artifacts, preset)
                shutil.copy(artifacts / f"{preset}.costs.duckdb", folder)
                if not (folder / f"{preset}.shapes.duckdb").exists():
                    planner.SHARES = shares
                    planner.write_mix(tables, folder, preset)
                config, spec, costs, samples = planner.read_inputs(folder, preset, num_devices, batch_size)
                samples, _ = leave_out_what_no_plan_holds(config, spec, costs, samples)
                yield name, (config, spec, costs, samples)


def regret(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> dict[str, object]:
    started = time.process_time()
    found = search_plans(config, spec, costs, samples)
    chosen = with_finalists_scheduled(found, config, spec, costs, samples).best.plan
    search_s = time.process_time() - started
    others = [candidate.plan for candidate in found.candidates[:NUM_FOUND]]
    others += fastest_recipes(config, spec, costs, samples)

    def step_s(plan: Plan, schedule: ScheduleConfig) -> float:
        pricer = pricer_of(plan, config, spec, costs)
        batches = GlobalBatches(len(samples), config.train.global_batch_size, SEED_OF_BATCHES)
        with BatchScheduler(samples, pricer, batches, schedule, config.seed).open() as scheduler:
            try:
                return float(np.mean([scheduler.schedule(step).step_s for step in range(NUM_BATCHES)]))
            except UserError:
                return np.inf

    chosen_s, own_s = step_s(chosen, DEFAULT), step_s(chosen, THOROUGH)
    by_plan = {str(plan): step_s(plan, THOROUGH) for plan in dict.fromkeys(others) if plan != chosen}
    by_plan[str(chosen)] = own_s
    best = min(by_plan, key=by_plan.__getitem__)
    best_s = by_plan[best]
    return {
        "search_s": search_s,
        "chosen": str(chosen),
        "step_s": chosen_s,
        "regret": chosen_s / best_s - 1,
        "trials": chosen_s / own_s - 1,
        "order": own_s / best_s - 1,
        "best": best,
        "steps_s": by_plan,
    }


def fastest_recipes(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> list[Plan]:
    """Of simple recipes, those with the fastest quick batches, or batches dealt by length, that fit into memory."""
    batches, limit_bytes = GroupedBatches(config, spec, costs, samples), config.cluster.memory_gib * 2**30
    enough = JustEnough(spec, config.model.trained, limit_bytes)
    priced: list[tuple[float, Plan]] = []
    for plan in recipes(config.cluster.num_devices, config.cluster.devices_per_node, config.train.global_batch_size):
        steps = []
        for policy in (LPT, BY_LENGTH):
            pricer = PlanPricer(plan, config, spec, costs, batches, policy)
            if pricer.step_s(0) > 1.1 * min((step_s for step_s, _ in priced), default=np.inf):
                continue
            fitting = pricer if pricer.needed_bytes() <= limit_bytes else enough.of(pricer)
            if fitting is not None:
                steps.append((fitting.mean_step_s(), fitting.plan))
        priced += sorted(steps, key=lambda priced: priced[0])[:1]
    return [plan for _, plan in sorted(priced, key=lambda priced: priced[0])[:NUM_RECIPES]]


def recipes(num_devices: int, per_node: int, batch_size: int) -> Iterator[Plan]:
    """Plans in which all devices hold all modules."""
    for placement in ("colocated", "monolithic"):
        for tp in (1, 2):
            dp = num_devices // tp
            numbers = {per_node // tp, 2 * per_node // tp, dp}
            shardings = [("optimizer", None), ("parameters", None)]
            shardings += [("hybrid", shards) for shards in sorted(numbers) if 1 < shards < dp]
            for of_vision in shardings:
                for of_llm in shardings:
                    for num_microbatches in range(1, min(MOST_MICROBATCHES, batch_size // dp) + 1):
                        vision, llm = (
                            Grid(module=name, num_ranks=num_devices, tp=size, sharding=sharding, shards=shards)
                            for name, size, (sharding, shards) in (
                                ("vision", tp if placement == "monolithic" else 1, of_vision),
                                ("llm", tp, of_llm),
                            )
                        )
                        yield Plan(placement=placement, grids=(vision, llm), num_microbatches=num_microbatches)


def print_row(row: dict) -> None:
    figures = "".join(f"{row[key]:>8.1%}" for key in ("regret", "trials", "order"))
    print(f"{row['case']:<38}{row['search_s']:>6.1f} s{row['step_s']:>7.3f} s{figures}", flush=True)
    print(f"    chosen {row['chosen']}", flush=True)
    if row["best"] != row["chosen"]:
        print(f"    best   {row['best']}", flush=True)


if __name__ == "__main__":
    main()
