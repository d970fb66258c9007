"""How much slower than the fastest plan the chosen one is, when both are scheduled with twenty times the trials.

    python tests/benchmarks/regret.py --shapes FOLDER [--only llava_ov_7b] [--devices 64] [--mixes ordinary pictures]

For each mix, the plans that the search prices within `--within` of its fastest are scheduled on the same two batches,
each with more or fewer recomputed layers as the choice would have it.
The regret is the chosen plan's step over the shortest of them. Also printed: how much shorter than its price each plan
is scheduled, i.e. whether prices order plans as schedules do. FOLDER and the costs are `planner.py`'s; costs take most
of the time, so `--artifacts` keeps them for the next run. `results/benchmarks/regret.json` has every plan. All steps
are predicted.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import planner

from dflop.base import UserError
from dflop.config import Config, ScheduleConfig
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.schedule import BatchScheduler, GlobalBatches
from dflop.search import (
    Candidate,
    best_first,
    final_choice,
    leave_out_what_no_plan_holds,
    pricer_of,
    search_plans,
    with_finalists_scheduled,
)
from dflop.shapes import SampleShapes

MODELS = {"llava_ov_7b": "llava_onevision", "qwen2_5_vl_7b": "qwen2_5_vl"}
MIXES = {
    "ordinary": {"image": 0.13, "multi_image": 0.43, "video": 0.44},
    "clips 5 %": {"image": 0.45, "text": 0.5, "clip": 0.05},
    "clips 50 %": {"image": 0.25, "text": 0.25, "clip": 0.5},
    "pictures": {"image": 0.5, "multi_image": 0.5},
    "videos": {"video": 1.0},
}
BATCH_SIZES = {8: 64, 64: 512}
NUM_BATCHES, TIMES_TRIALS = 2, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--devices", type=int, nargs="+", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--within", type=float, default=1.06, help="the most of a plan's price over the least one")
    parser.add_argument("--most", type=int, default=24, help="the most plans that are scheduled")
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs in")
    arguments = parser.parse_args()
    planner.FAMILIES |= MODELS
    print(f"python {' '.join(sys.argv)}", flush=True)
    found = []
    with tempfile.TemporaryDirectory() as name:
        for preset in arguments.only:
            folder = planner.folder_with_costs(preset, arguments.artifacts or Path(name))
            for mix in arguments.mixes:
                planner.SHARES = MIXES[mix]
                planner.write_mix(arguments.shapes, folder, preset)
                for num_devices in arguments.devices:
                    found.append({"model": preset, "mix": mix, "devices": num_devices})
                    inputs = planner.read_inputs(folder, preset, num_devices, BATCH_SIZES[num_devices])
                    found[-1] |= regret(*inputs, within=arguments.within, most_plans=arguments.most)
                    print_row(found[-1])
    out = planner.REPOSITORY / "results/benchmarks/regret.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def regret(
    config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, *, within: float, most_plans: int
) -> dict[str, object]:
    """The chosen plan and the others, each with its price, its schedules as in training and with more trials."""
    samples, _ = leave_out_what_no_plan_holds(config, spec, costs, samples)
    started = time.process_time()
    found = search_plans(config, spec, costs, samples)
    found = with_finalists_scheduled(found, config, spec, costs, samples)
    search_s = time.process_time() - started
    few, best_first._NUM_COMPARED = best_first._NUM_COMPARED, most_plans
    others = search_plans(config, spec, costs, samples, compares=True).candidates
    best_first._NUM_COMPARED = few
    rows, choice = [], final_choice._Choice(config, spec, costs, samples)
    most_s = within * found.candidates[0].step_s
    plans = {str(plan.plan): plan for plan in [found.best, *(plan for plan in others if plan.step_s <= most_s)]}
    for number, candidate in enumerate(list(plans.values())[:most_plans]):
        if number:
            candidate = refined(choice, candidate)
        if any(row["plan"] == str(candidate.plan) for row in rows):
            continue
        usual_s, long_s = (
            scheduled_s(candidate.plan, config, spec, costs, samples, times) for times in (1, TIMES_TRIALS)
        )
        rows.append({"plan": str(candidate.plan), "priced_s": candidate.step_s, "usual_s": usual_s, "long_s": long_s})
    best = min(rows, key=lambda row: row["long_s"])
    return {
        "search_s": search_s,
        "regret": rows[0]["long_s"] / best["long_s"] - 1,
        "chosen": rows[0],
        "best": best,
        "num_plans": len(rows),
        "rows": rows,
    }


def refined(choice: final_choice._Choice, candidate: Candidate) -> Candidate:
    """The plan with just the layers recomputed that its scheduled batches have no room for, as the chosen one."""
    candidate, steps_s = choice._with_room(candidate, None)
    if steps_s is None:
        return candidate
    return choice._fastest([final_choice._Finalist(candidate=candidate, steps_s=steps_s)])[1]


def scheduled_s(
    plan: Plan, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, times_trials: int
) -> float:
    """The mean step of the first batches with so many times the trials of training. It is infinite where a batch does
    not fit: one of these, or one that `dflop plan` looks at before it chooses the plan."""
    batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
    schedule = ScheduleConfig(policy="search")
    schedule = replace(schedule, search_trials=times_trials * schedule.search_trials)
    pricer = pricer_of(plan, config, spec, costs)
    with BatchScheduler(samples, pricer, batches, schedule, config.seed).open() as scheduler:
        try:
            final_choice._require_fit(scheduler)
            return float(np.mean([scheduler.schedule(step).step_s for step in range(NUM_BATCHES)]))
        except UserError:
            return np.inf


def print_row(about: dict) -> None:
    holding = [row for row in about["rows"] if np.isfinite(row["long_s"])]
    ratios = [row["usual_s"] / row["priced_s"] for row in holding]
    following = [row["long_s"] / about["chosen"]["long_s"] - 1 for row in holding if row is not about["chosen"]]
    print(
        f"{about['model']:<14} {about['mix']:<11} {about['devices']:>3} devices: regret {about['regret']:.2%}, the "
        f"next plan {min(following, default=np.nan):+.2%}, of {len(holding)} that hold all batches of "
        f"{about['num_plans']}; scheduled over priced {min(ratios):.3f} to {max(ratios):.3f}; search "
        f"{about['search_s']:.1f} s of a core"
    )
    for name in ("chosen", "best"):
        row = about[name]
        print(
            f"    {name:<6} {row['priced_s']:.3f} {row['usual_s']:.3f} {row['long_s']:.3f} s {row['plan']}", flush=True
        )


if __name__ == "__main__":
    main()
