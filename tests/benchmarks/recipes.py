"""Simple recipes against the chosen plan: whether someone who tries all of them by hand finds a shorter step.

    python tests/benchmarks/recipes.py --shapes FOLDER [--only llava_ov_7b] [--devices 64] [--mixes ordinary pictures]

A recipe has one pipeline stage, 1 to 12 microbatches, an LLM over one or two ranks and an encoder over one. Replicas
share nothing, the optimiser's state, all parameters, or these in groups of 2, 4, 8, ...; those of the encoder the same
or the optimiser's state alone. Its batches are dealt by length, by Karmarkar and Karp's method, or by our sampler. Just
enough layers are recomputed to hold the two batches that count: in a recipe's favour, as a chosen plan has to hold 200
batches. The plans of the `--most` fastest recipes are scheduled as training would schedule them, too, with more or
fewer recomputed layers as the choice would have it, which tells what the search's list lacks. FOLDER, the mixes and
`--artifacts` are `regret.py`'s. All steps are predicted.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import planner
import regret

from dflop.balance import BY_LENGTH
from dflop.base import UserError
from dflop.comparison.compare import NUM_TRIED, fastest_that_fits
from dflop.comparison.system import System
from dflop.comparison.systems import fsdp_balanced, karmarkar_karp
from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import COLOCATED, Grid, Plan
from dflop.schedule import GlobalBatches
from dflop.search import final_choice, leave_out_what_no_plan_holds, search_plans, with_finalists_scheduled
from dflop.shapes import SampleShapes

MOST_MICROBATCHES = 12
POLICIES = {
    "by length": BY_LENGTH,
    "Karmarkar-Karp": karmarkar_karp.SYSTEM.policy,
    "our sampler": fsdp_balanced.SYSTEM.policy,
}


@dataclass(frozen=True)
class Recipe:
    """A plan without a price, as a comparison takes it."""

    plan: Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", choices=regret.MODELS, nargs="+", default=list(regret.MODELS))
    parser.add_argument("--devices", type=int, nargs="+", choices=regret.BATCH_SIZES, default=list(regret.BATCH_SIZES))
    parser.add_argument("--mixes", nargs="+", choices=regret.MIXES, default=list(regret.MIXES))
    parser.add_argument("--most", type=int, default=6, help="the most recipes whose plans are scheduled")
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs in")
    arguments = parser.parse_args()
    planner.FAMILIES |= regret.MODELS
    print(f"python {' '.join(sys.argv)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for preset in arguments.only:
            folder = planner.folder_with_costs(preset, arguments.artifacts or Path(name))
            for mix in arguments.mixes:
                planner.SHARES = regret.MIXES[mix]
                planner.write_mix(arguments.shapes, folder, preset)
                for num_devices in arguments.devices:
                    inputs = planner.read_inputs(folder, preset, num_devices, regret.BATCH_SIZES[num_devices])
                    print(f"{preset}, {mix}, {num_devices} devices", flush=True)
                    compare(*inputs, most=arguments.most)


def compare(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, *, most: int) -> None:
    """Print the chosen plan's step, and of the fastest recipes the steps with their own batches and with ours."""
    samples, _ = leave_out_what_no_plan_holds(config, spec, costs, samples)
    about = config, spec, costs, samples
    chosen = with_finalists_scheduled(search_plans(*about), *about).best.plan
    chosen_s = regret.scheduled_s(chosen, *about, 1)
    print(f"    chosen {chosen_s:.3f} s {chosen}", flush=True)
    batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
    shapes = {step: samples.take(batches[step]) for step in range(NUM_TRIED)}
    started, found, num_recipes = time.process_time(), [], 0
    for (label, policy), num_microbatches in itertools.product(POLICIES.items(), range(1, MOST_MICROBATCHES + 1)):
        for tp, sharding in itertools.product((1, 2), ("optimizer", "parameters", "hybrid")):
            plans = list(recipes(config, spec, tp, sharding, num_microbatches))
            num_recipes += len(plans)
            system = System(
                name=label,
                plans=lambda *_, plans=plans: [Recipe(plan) for plan in plans],
                policy=policy,
                moves_samples=False,
            )
            with suppress(UserError):  # nothing of the kind fits
                pricer, schedules = fastest_that_fits(system, *about, shapes, range(NUM_TRIED))
                found.append((fmean(schedule.step_s for schedule in schedules), label, pricer.plan))
    print(f"    {num_recipes} recipes, {time.process_time() - started:.0f} s of a core", flush=True)
    found.sort(key=lambda row: row[0])
    choice = final_choice._Choice(*about)
    for step_s, label, plan in found[:most]:
        plan = regret.refined(choice, choice._pricer(plan).candidate()).plan
        ours_s = regret.scheduled_s(plan, *about, 1)
        print(
            f"    {step_s / chosen_s:.4f} {label}, {ours_s / chosen_s:.4f} as we schedule: {plan}",
            flush=True,
        )


def recipes(config: Config, spec: ModelSpec, tp: int, sharding: str, num_microbatches: int) -> Iterator[Plan]:
    """The plans of recipes with this tp and sharding of the LLM, and so many microbatches."""
    num_devices, encoder = config.cluster.num_devices, spec.encoders[0].name
    sizes = [1 << power for power in range(1, num_devices.bit_length()) if 1 << power < num_devices // tp]
    for shards, encoder_sharding in itertools.product(
        sizes if sharding == "hybrid" else [None], dict.fromkeys((sharding, "optimizer"))
    ):
        own = {"sharding": sharding, "shards": shards}
        encoders = own if encoder_sharding == sharding else {"sharding": encoder_sharding}
        with suppress(UserError):  # a batch has too few samples, or no such grid is possible
            yield Plan(
                placement=COLOCATED.name,
                grids=(
                    Grid(module=encoder, num_ranks=num_devices, **encoders),
                    Grid(module="llm", num_ranks=num_devices, tp=tp, **own),
                ),
                num_microbatches=num_microbatches,
            )


if __name__ == "__main__":
    main()
