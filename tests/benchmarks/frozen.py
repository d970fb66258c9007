"""How the fastest plan changes with what is trained: everything, projector and LLM, the LLM, or the projector alone.

    python tests/benchmarks/frozen.py --shapes FOLDER

A 7B model on 8 and on 64 H100s. For each the fastest plan is searched, and beside it the step of the plan that is
fastest where everything is trained, with less trained. All steps are predicted, from analytic costs of compiled layers,
with quick batches. FOLDER and the mix are `planner.py`'s.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import gains

from dflop.balance import LPT
from dflop.plan import Plan
from dflop.search import PlanPricer
from dflop.search.grouped_batches import GroupedBatches

TRAINED = {
    "everything": (),
    "projector and LLM": ("vision.encoder",),
    "LLM": ("vision",),
    "projector": ("vision.encoder", "llm"),
}
CLUSTER = {"batch": 64, "device": "h100-80g", "intra_gbps": 3600, "inter_gbps": 400}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    arguments = parser.parse_args()
    print(f"python {' '.join(sys.argv)}", flush=True)
    for nodes in (1, 8):
        print(f"\n{8 * nodes} H100s, batches of {64 * nodes}\n   step  GiB  as for everything  plan", flush=True)
        of_everything = None
        for trained, freeze in TRAINED.items():
            row = gains.Row(preset="llava_ov_7b", nodes=nodes, freeze=freeze, **CLUSTER | {"batch": 64 * nodes})
            with tempfile.TemporaryDirectory() as name:
                inputs = gains.inputs_of(row, arguments.shapes, Path(name))
                best = gains.fastest(inputs, gains.EVERYTHING)
                of_everything = of_everything or best.plan
                same_s = step_s(of_everything, *inputs)
            gib = max(best.memory_bytes.values()) / 2**30
            print(f"{best.step_s:6.3f}s {gib:4.0f}  {same_s:15.3f}s  {trained}: {best.plan}", flush=True)


def step_s(plan: Plan, config, spec, costs, samples) -> float:
    """The mean step of a plan; layers that it recomputes are kept, as what is not trained needs no recomputing."""
    kept = replace(plan, checkpointing=False, grids=tuple(replace(grid, recomputed=()) for grid in plan.grids))
    pricer = PlanPricer(kept, config, spec, costs, GroupedBatches(config, spec, costs, samples), LPT)
    return pricer.mean_step_s()


if __name__ == "__main__":
    main()
