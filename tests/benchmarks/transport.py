"""How much longer a step is with messages as a GPU carries them than if each began when it is made.

    python tests/benchmarks/transport.py --shapes FOLDER [--only TEXT] [--artifacts FOLDER]

Searches and schedulers compare steps in which messages begin when they are made; the step that a plan and a schedule
show has the waits of a GPU (`step.carried`). Here a plan's batches are timed both ways, with the same seconds. Plans
are the fastest with pipelines of each placement and schedule, on 64 H100s with 400 Gbit/s a device between nodes, and
on 32 A100s over PCIe with 3 Gbit/s. FOLDER, the mix and the costs are `planner.py`'s, with fewer samples and tp of 1
and 2 alone. Costs take most of the time, so `--artifacts` keeps them for the next run.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import gains
import numpy as np
import planner

from dflop.config import FixedGrid, FixedPlan, PlanConfig
from dflop.plan import PLACEMENTS
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer
from dflop.step import simulate

CLUSTERS = (
    {"nodes": 8, "batch": 512, "device": "h100-80g", "intra_gbps": 3600, "inter_gbps": 400},
    {"nodes": 4, "batch": 256, "intra_gbps": gains.PCIE_GBPS, "inter_gbps": 25 / 8},
)
MODELS = ("llava_ov_7b", "internvl_38b")
SCHEDULES = ("1f1b", "interleaved_1f1b", "gpipe")
NUM_BATCHES, NUM_SAMPLES, TP_SIZES = 4, 16_384, (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs and samples in")
    arguments = parser.parse_args()
    print(f"python {' '.join(sys.argv)}\n\n   longer   at once  plan", flush=True)
    planner.NUM_SAMPLES, planner.TP_SIZES = NUM_SAMPLES, TP_SIZES
    rows = [gains.Row(preset=preset, **cluster) for preset in MODELS for cluster in CLUSTERS]
    with tempfile.TemporaryDirectory() as temporary:
        for row in (row for row in rows if arguments.only in row.name):
            print(f"\n{row.name}", flush=True)
            folder = (arguments.artifacts or Path(temporary)) / f"{row.preset} {row.device} {row.inter_gbps:g}"
            folder.mkdir(parents=True, exist_ok=True)
            inputs = gains.inputs_of(row, arguments.shapes, folder)
            for placement in PLACEMENTS:
                for schedule in SCHEDULES:
                    judge(inputs, placement, schedule)


def judge(inputs, placement: str, schedule: str) -> None:
    """Print a line on the fastest plan with a pipeline of this placement and schedule."""
    config, spec, costs, samples = inputs
    found = None
    for pp in (2, 4):
        fixed = FixedPlan(modules={"llm": FixedGrid(pp=pp)})
        within = PlanConfig(placements=[placement], schedules=[schedule], fixed=fixed)
        best = gains.fastest(inputs, within)
        if not isinstance(best, str) and (found is None or best.step_s < found.step_s):
            found = best
    if found is None:
        return
    plan = found.plan
    pricer = Pricer(plan, costs, spec, config.cluster, precision=config.train.precision)
    batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
    policy = replace(config.schedule, policy="search")
    priced, carried = [], []
    with BatchScheduler(samples, pricer, batches, policy, config.seed).open() as scheduler:
        for step in range(NUM_BATCHES):
            decided = scheduler.schedule(step)
            times = pricer.stage_times(decided.shapes, decided.assignment)
            order = pricer.order(decided.assignment.slots)
            priced.append(simulate(order, times).computed_s.max())
            carried.append(simulate(order, times, carried=True).computed_s.max())
    print(f"{np.mean(carried) / np.mean(priced) - 1:9.2%} {np.mean(priced):7.3f}s  {plan}", flush=True)


if __name__ == "__main__":
    main()
