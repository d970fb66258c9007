"""What was tried and brings little or nothing, and how little, in simulation.

    python tests/benchmarks/tried.py --shapes FOLDER [--batches 4] [--only llava_ov_7b]

For 64 H100s and batches of 512, on the plan that our search takes and on the best pipeline over devices of its own for
encoder and LLM:

- *samples cut*: how much shorter a step would be, were samples cut over replicas and microbatches at will (a linear
  programme; of several replicas of an encoder nearly a bound). What other microbatches could bring is in it as well;
- *count chosen per batch*: the mean step where each batch takes the number of microbatches that suits it best, beside
  the one number that is best for all.

FOLDER, the mix and the costs are `planner.py`'s. `results/benchmarks/tried.json` has every batch.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import planner
from comparison import MODELS
from relaxed_step import relaxed_step_s

from dflop.base import UserError
from dflop.config import Config, PlanConfig, load_config
from dflop.costs import CostModel
from dflop.models import ModelSpec, load_model_spec
from dflop.plan import Plan
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer
from dflop.search import leave_out_what_no_plan_holds, search_plans
from dflop.shapes import SampleShapes, load_samples

DEVICES, BATCH_SIZE = 64, 512
SPACES = {"the best plan": None, "the best pipeline": PlanConfig(placements=["disjoint"], shardings=["optimizer"])}
# Numbers of microbatches beside the plan's, as multiples of it.
MULTIPLES = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--only", choices=MODELS, help="one of the two models")
    arguments = parser.parse_args()
    planner.FAMILIES |= MODELS
    print(f"python {' '.join(sys.argv)}", flush=True)
    found = []
    with tempfile.TemporaryDirectory() as name:
        for preset in [arguments.only] if arguments.only else MODELS:
            folder = Path(name)
            planner.write_artifacts(arguments.shapes, folder, preset)
            config = load_config(planner.write_config(folder, preset, DEVICES, BATCH_SIZE))
            spec, costs = load_model_spec(config.model), CostModel.load(folder / f"{preset}.costs.duckdb")
            samples, _ = load_samples(folder / f"{preset}.shapes.duckdb", spec.encoders)
            samples, _ = leave_out_what_no_plan_holds(config, spec, costs, samples)
            for what, within in SPACES.items():
                plan = search_plans(config, spec, costs, samples, within=within).best.plan
                print(f"\n{preset}, {what}: {plan}", flush=True)
                found.append({"model": preset, "which": what, "plan": str(plan)})
                found[-1] |= judge(plan, config, spec, costs, samples, range(arguments.batches))
    out = planner.REPOSITORY / "results/benchmarks/tried.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def judge(
    plan: Plan, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, steps: range
) -> dict[str, object]:
    """The steps of each batch: as scheduled, were samples cut, and with each number of microbatches."""
    pricer = pricer_of(plan, config, spec, costs)
    own = steps_s(pricer, config, samples, steps)
    batches = GlobalBatches(len(samples), BATCH_SIZE, config.seed)
    cut = np.array([relaxed_step_s(pricer, samples.take(batches[step])) for step in steps])
    print(f"  samples cut at will: at most {np.mean(own) / np.mean(cut) - 1:.1%} shorter", flush=True)
    by_count = {}
    for count in sorted({max(1, round(plan.num_microbatches * multiple)) for multiple in MULTIPLES}):
        if count * plan.grid("llm").dp <= BATCH_SIZE:
            try:
                other = pricer_of(replace(plan, num_microbatches=count), config, spec, costs)
                by_count[count] = steps_s(other, config, samples, steps)
            except UserError:
                print(f"  {count} microbatches do not fit")
    table = np.array(list(by_count.values()))
    best, chosen = table.mean(axis=1).min(), table.min(axis=0).mean()
    print(
        f"  number of microbatches (of {list(by_count)}) chosen per batch: {best / chosen - 1:.1%} shorter", flush=True
    )
    return {
        "scheduled_s": own.tolist(),
        "cut_s": cut.tolist(),
        "by_count_s": {k: v.tolist() for k, v in by_count.items()},
    }


def pricer_of(plan: Plan, config: Config, spec: ModelSpec, costs: CostModel) -> Pricer:
    return Pricer(plan, costs, spec, config.cluster, precision=config.train.precision)


def steps_s(pricer: Pricer, config: Config, samples: SampleShapes, steps: range) -> np.ndarray:
    batches = GlobalBatches(len(samples), BATCH_SIZE, config.seed)
    with BatchScheduler(samples, pricer, batches, config.schedule, config.seed).open() as scheduler:
        return np.array([scheduler.schedule(step, "search").step_s for step in steps])


if __name__ == "__main__":
    main()
