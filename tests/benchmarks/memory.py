"""What ranks of plans hold by the memory model, beside what `dflop check-plan` finds on tensors without values.

    python tests/benchmarks/memory.py [--only NAME ...]

Twelve plans of a 7B model and of a 78B one (6B + 72B), which differ in what memory depends on: placement, tensor and
pipeline parallelism, schedule, checkpointing and sharding; and six of Qwen's models, whose encoders are of another
kind. Checked is the first rank of each module's first and last pipeline stage; one rank stands for all that carry the
same stages. Four pictures of 768 pixels and 2,048 tokens of text go through each microbatch. No memory and no GPU is
needed; a rank takes a quarter of a minute to one. A table is printed as Markdown and `results/benchmarks/memory.json`
written, which holds what earlier calls with `--only` found as well. The summary is in
docs/explanation/measurements/.
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import polars as pl

from dflop.base.devices import load_device
from dflop.checks.of_plan import MadeUpLoad
from dflop.checks.of_plan.memory import CheckedRank, check_rank
from dflop.config import load_config
from dflop.config.schema import Config
from dflop.costs import CostModel
from dflop.costs.analytic import analytic_points
from dflop.costs.fit import fit_model, median_points
from dflop.models import load_model_spec
from dflop.plan import Grid, Plan
from dflop.schedule import MEMORY_CATEGORIES

REPOSITORY = Path(__file__).parents[2]
LOAD = MadeUpLoad(num_pictures=4, picture_side=768, text_tokens=2048)
DEVICE = "h100-80g"
FAMILIES = {
    "llava_ov_7b": "llava_onevision",
    "internvl_78b": "internvl",
    "qwen2_5_vl_7b": "qwen2_5_vl",
    "qwen3_vl_8b": "qwen3_vl",
}
# Of activations; everything else is exact, or within 0.4 % where torch fills shards up to equal sizes.
MOST_OFF = 0.05
SHARED = {"sharding": "parameters"}


def plan(placement: str, vision: Grid, llm: Grid, num_microbatches: int, **how) -> Plan:
    return Plan(placement=placement, grids=(vision, llm), num_microbatches=num_microbatches, **how)


def vision(num_ranks: int, **how) -> Grid:
    return Grid(module="vision", num_ranks=num_ranks, **how)


def llm(num_ranks: int, **how) -> Grid:
    return Grid(module="llm", num_ranks=num_ranks, **how)


PLANS = {
    "7b-shared": ("llava_ov_7b", plan("colocated", vision(8, **SHARED), llm(8, **SHARED), 2)),
    "7b-monolithic": ("llava_ov_7b", plan("monolithic", vision(4, tp=2), llm(8, tp=2, pp=2), 4, checkpointing=True)),
    "7b-shared, some layers": (
        "llava_ov_7b",
        plan(
            "monolithic",
            vision(8, **SHARED, recomputed=(26,)),
            llm(8, **SHARED, recomputed=(17,), attention_kept=(9,)),
            2,
            checkpointing=True,
        ),
    ),
    "7b-disjoint, some layers": (
        "llava_ov_7b",
        plan(
            "disjoint",
            vision(2, recomputed=(10,)),
            llm(8, tp=2, pp=4, rank_offset=2, recomputed=(5, 4, 2, 0), attention_kept=(2, 4, 1, 0)),
            8,
            checkpointing=True,
        ),
    ),
    "7b-disjoint, offloaded": (
        "llava_ov_7b",
        plan(
            "disjoint",
            vision(2, recomputed=(10,), offloaded=(8,)),
            llm(8, tp=2, pp=4, rank_offset=2, recomputed=(2, 0, 0, 0), offloaded=(3, 5, 3, 2)),
            8,
            checkpointing=True,
        ),
    ),
    "7b-shared, offloaded": (
        "llava_ov_7b",
        plan(
            "monolithic",
            vision(8, **SHARED, offloaded=(3,), recomputed=(14,)),
            llm(8, **SHARED, offloaded=(9,), recomputed=(0,)),
            2,
            checkpointing=True,
        ),
    ),
    "7b-interleaved": (
        "llava_ov_7b",
        plan("colocated", vision(8), llm(8, tp=2, pp=2), 4, schedule="interleaved_1f1b", num_chunks=2),
    ),
    "7b-filled": ("llava_ov_7b", plan("bubble_filled", vision(8), llm(8, tp=2, pp=4), 8)),
    "78b-shared": ("internvl_78b", plan("colocated", vision(32, **SHARED), llm(32, **SHARED), 2, checkpointing=True)),
    "78b-disjoint": (
        "internvl_78b",
        plan("disjoint", vision(8, **SHARED), llm(32, tp=8, pp=4, rank_offset=8), 8, checkpointing=True),
    ),
    "qwen2.5-shared": ("qwen2_5_vl_7b", plan("colocated", vision(8, **SHARED), llm(8, **SHARED), 2)),
    "qwen2.5-disjoint": ("qwen2_5_vl_7b", plan("disjoint", vision(4, pp=2), llm(4, tp=2, rank_offset=4), 4)),
    "qwen3-disjoint": ("qwen3_vl_8b", plan("disjoint", vision(4, pp=2), llm(4, tp=2, rank_offset=4), 4)),
    "qwen2.5-shared, recomputing": (
        "qwen2_5_vl_7b",
        plan("colocated", vision(8, **SHARED), llm(8, **SHARED), 2, checkpointing=True),
    ),
    "qwen2.5-disjoint, some layers": (
        "qwen2_5_vl_7b",
        plan(
            "disjoint",
            vision(2, tp=2, recomputed=(24,)),
            llm(4, tp=2, rank_offset=2, recomputed=(14,)),
            4,
            checkpointing=True,
        ),
    ),
    "qwen3-disjoint, encoder recomputing": (
        "qwen3_vl_8b",
        plan(
            "disjoint",
            vision(2, recomputed=(27,)),
            llm(4, tp=2, rank_offset=2, recomputed=(0,)),
            4,
            checkpointing=True,
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PLANS, default=list(PLANS), help="some of the plans")
    arguments = parser.parse_args()
    out = REPOSITORY / "results/benchmarks/memory.json"
    found = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    print("| plan | rank | GiB | " + " | ".join(MEMORY_CATEGORIES) + " |")
    print("|---" * (3 + len(MEMORY_CATEGORIES)) + "|")
    for name in arguments.only:
        found[name] = []
        for checked, seconds in checked_ranks(*PLANS[name]):
            found[name].append(
                {"rank": checked.rank, "nodes": list(map(str, checked.nodes)), "predicted": checked.predicted}
                | {"tracked": checked.tracked, "seconds": seconds}
            )
            print_rank(name, checked)
    off = max(
        abs(rank["predicted"]["activations"] / rank["tracked"]["activations"] - 1)
        for ranks in found.values()
        for rank in ranks
    )
    print(f"\nactivations are off by {off:.1%} at most (target {MOST_OFF:.0%})")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def checked_ranks(preset: str, plan: Plan) -> Iterator[tuple[CheckedRank, float]]:
    costs = costs_of(preset, tuple((own.module, own.tp) for own in plan.grids))
    for rank in ranks_that_differ(plan):
        started = time.perf_counter()
        yield check_rank(config_of(preset), plan, costs, LOAD, rank), time.perf_counter() - started


def config_of(preset: str) -> Config:
    return load_config(
        {
            "model": {"family": FAMILIES[preset], "preset": preset},
            "cluster": {"device_model": DEVICE, "devices_per_node": 8},
            "costs": {"source": "analytic"},
            "train": {"precision": "bf16"},
        }
    )


def ranks_that_differ(plan: Plan) -> list[int]:
    """The first rank of each module's first and last pipeline rank."""
    return sorted({grid.first_rank(place, 0) for grid in plan.grids for place in {0, grid.pp - 1}})


@lru_cache
def costs_of(preset: str, tp_sizes: tuple[tuple[str, int], ...]) -> CostModel:
    spec, device = load_model_spec(config_of(preset).model), load_device(DEVICE)
    points = [analytic_points(spec, module, tp, device) for module, tp in tp_sizes]
    measurements = median_points(pl.concat([own.measurements for own in points]))
    return fit_model(measurements, pl.concat([own.parameters for own in points]), "analytic")


def print_rank(name: str, checked: CheckedRank) -> None:
    held = " + ".join(f"{node.module} {node.pp_stage}" for node in checked.nodes)
    for what, of in (("predicted", checked.predicted), ("tracked", checked.tracked)):
        cells = [f"{of[category] / 2**30:.2f}" for category in MEMORY_CATEGORIES]
        print(f"| {name} | {checked.rank}: {held} | {what} | " + " | ".join(cells) + " |", flush=True)
    both = [(checked.predicted[category], checked.tracked[category]) for category in MEMORY_CATEGORIES]
    ratios = [f"{predicted / tracked:.3f}" if tracked else "" for predicted, tracked in both]
    print("| | | ratio | " + " | ".join(ratios) + " |", flush=True)


if __name__ == "__main__":
    main()
