"""What each schedule, placement, sharding and the order of microbatches brings, over many clusters and models.

    python tests/benchmarks/gains.py --shapes FOLDER [--only TEXT] [--processes 2]

For each row the fastest plan of all is searched, then the fastest plan without each value that it uses. A value's gain
in a row is how much longer the step is without it; a value that the fastest plan does not use brings 0. Order is that
of a replica's microbatches, on the fastest plan: small ones at both ends, or as they come. All steps are predicted,
from analytic costs of compiled layers, with quick batches. FOLDER and the mix are `planner.py`'s; other mixes have
other shares of it. A sample of text alone is assumed to be eight of the tables' texts. `results/benchmarks/gains.json`
has the plans.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import planner
import yaml

from dflop.balance import LPT
from dflop.base import UserError
from dflop.comparison.ablation import LPT_ORDERED
from dflop.comparison.compare import scheduled_by
from dflop.comparison.system import System
from dflop.config import Config, PlanConfig
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS, SCHEDULES, SHARDINGS, Plan
from dflop.schedule import GlobalBatches
from dflop.search import Candidate, pricer_of, search_plans
from dflop.shapes import SampleShapes

FAMILIES = {
    "llava_ov_7b": "llava_onevision",
    "llava_ov_72b": "llava_onevision",
    "internvl_2b": "internvl",
    "internvl_38b": "internvl",
    "internvl_78b": "internvl",
    "qwen2_5_omni_7b": "qwen2_5_omni_thinker",
}
EVERYTHING = PlanConfig(placements=list(PLACEMENTS), schedules=list(SCHEDULES), shardings=list(SHARDINGS))
TEXT_HEAVY = {"text": 0.8, "image": 0.1, "multi_image": 0.05, "video": 0.05}
VIDEO_HEAVY = {"image": 0.1, "multi_image": 0.1, "video": 0.8}


@dataclass(frozen=True, kw_only=True)
class Row:
    preset: str
    nodes: int
    per_node: int = 8
    batch: int
    device: str = "a100-80g"
    memory_gib: float | None = None
    intra_gbps: int = 2400
    inter_gbps: float
    model: Mapping[str, object] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=lambda: dict(planner.SHARES))
    mix: str = "the paper's"

    @property
    def name(self) -> str:
        memory = f" of {self.memory_gib:.0f} GiB" if self.memory_gib else ""
        trained = f", frozen {' and '.join(self.model['freeze'])}" if "freeze" in self.model else ""
        trained += f", LoRA {self.model['lora']['rank']}" if "lora" in self.model else ""
        trained += f", training {' and '.join(self.model['train'])}" if "train" in self.model else ""
        return (
            f"{self.preset}, {self.nodes} x {self.per_node} {self.device}{memory}, {self.intra_gbps} and "
            f"{self.inter_gbps:g} Gbit/s a device, batch {self.batch}, {self.mix} mix{trained}"
        )


# A100s over PCIe 4.0 (some 200 Gbit/s a direction) with one card a node, whose speed a node's devices share.
PCIE_GBPS = 200
SMALL = {"memory_gib": 22, "intra_gbps": PCIE_GBPS, "inter_gbps": 100 / 8}
ROWS = (
    Row(preset="llava_ov_7b", nodes=8, batch=512, device="h100-80g", intra_gbps=3600, inter_gbps=400),
    Row(preset="internvl_38b", nodes=8, batch=512, device="h100-80g", intra_gbps=3600, inter_gbps=400),
    Row(preset="llava_ov_7b", nodes=2, batch=128, intra_gbps=PCIE_GBPS, inter_gbps=25 / 8),
    Row(preset="llava_ov_7b", nodes=4, batch=256, intra_gbps=PCIE_GBPS, inter_gbps=25 / 8),
    Row(preset="llava_ov_7b", nodes=4, batch=256, intra_gbps=PCIE_GBPS, inter_gbps=100 / 8),
    Row(preset="llava_ov_7b", nodes=32, batch=2048, intra_gbps=PCIE_GBPS, inter_gbps=25 / 8),
    Row(preset="internvl_38b", nodes=4, batch=256, intra_gbps=PCIE_GBPS, inter_gbps=100 / 8),
    Row(preset="internvl_38b", nodes=8, batch=512, inter_gbps=25 / 8),
    Row(preset="internvl_2b", nodes=1, batch=64, memory_gib=22, intra_gbps=PCIE_GBPS, inter_gbps=25 / 8),
    Row(preset="internvl_2b", nodes=4, batch=256, memory_gib=22, intra_gbps=PCIE_GBPS, inter_gbps=25 / 8),
    Row(preset="llava_ov_7b", nodes=4, batch=256, memory_gib=44, intra_gbps=PCIE_GBPS, inter_gbps=100 / 8),
    Row(preset="llava_ov_7b", nodes=1, batch=64, memory_gib=44, intra_gbps=PCIE_GBPS, inter_gbps=100 / 8),
    Row(preset="llava_ov_72b", nodes=4, batch=256, inter_gbps=200),
    Row(preset="internvl_78b", nodes=8, batch=512, device="h100-80g", intra_gbps=3600, inter_gbps=400),
    Row(preset="llava_ov_7b", nodes=16, per_node=1, batch=128, inter_gbps=100),
    Row(preset="internvl_2b", nodes=8, per_node=1, batch=64, memory_gib=22, inter_gbps=25),
    Row(preset="llava_ov_7b", nodes=4, batch=256, inter_gbps=200, model={"freeze": ["vision"]}),
    Row(preset="internvl_38b", nodes=4, batch=256, inter_gbps=200, model={"freeze": ["llm"]}),
    Row(preset="internvl_38b", nodes=8, batch=512, inter_gbps=200, model={"freeze": ["vision"]}),
    Row(preset="llava_ov_7b", nodes=4, batch=256, inter_gbps=200, shares=TEXT_HEAVY, mix="text-heavy"),
    Row(preset="llava_ov_7b", nodes=4, batch=256, inter_gbps=200, shares=VIDEO_HEAVY, mix="video-heavy"),
    Row(preset="internvl_38b", nodes=8, batch=512, inter_gbps=200, shares=TEXT_HEAVY, mix="text-heavy"),
    Row(preset="internvl_38b", nodes=8, batch=512, inter_gbps=200, shares=VIDEO_HEAVY, mix="video-heavy"),
    Row(preset="llava_ov_7b", nodes=4, batch=64, inter_gbps=200),
    Row(preset="llava_ov_7b", nodes=4, batch=64, inter_gbps=25 / 8),
    Row(preset="llava_ov_7b", nodes=4, batch=64, intra_gbps=PCIE_GBPS, inter_gbps=25 / 8),
    Row(preset="llava_ov_7b", nodes=4, batch=64, device="h100-80g", intra_gbps=3600, inter_gbps=25 / 8),
    Row(preset="qwen2_5_omni_7b", nodes=4, batch=256, inter_gbps=200),
    Row(preset="qwen2_5_omni_7b", nodes=4, batch=256, intra_gbps=PCIE_GBPS, inter_gbps=25 / 8),
    Row(preset="llava_ov_7b", nodes=1, batch=64, **SMALL, model={"train": ["projector"]}),
    Row(preset="llava_ov_7b", nodes=1, batch=64, **SMALL, model={"train": ["projector"], "lora": {"rank": 16}}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    print(f"python {' '.join(sys.argv)}", flush=True)
    rows = [row for row in ROWS if arguments.only in row.name]
    out = planner.REPOSITORY / "results/benchmarks/gains.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    found = []
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(gains_of, row, arguments.shapes) for row in rows]):
            found.append(done.result())
            print_row(found[-1])
            out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print_largest(found)


def gains_of(row: Row, tables: Path) -> dict[str, object]:
    """The fastest plan of a row and, for each value that it uses, the fastest plan without it."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        inputs = inputs_of(row, tables, Path(name))
        best = fastest(inputs, EVERYTHING)
        if isinstance(best, str):
            return {"row": row.name, "why": best}
        without = {}
        for key, value in values_of(best.plan):
            rest = [other for other in getattr(EVERYTHING, key) if other != value]
            without[value] = fastest(inputs, replace(EVERYTHING, **{key: rest}))
        gains, plans = {}, {}
        for value, other in without.items():
            gains[value] = "nothing fits" if isinstance(other, str) else other.step_s / best.step_s - 1
            plans[value] = other if isinstance(other, str) else str(other.plan)
        gains["order"] = order_gain(best.plan, *inputs)
    return {
        "row": row.name,
        "plan": str(best.plan),
        "step_s": best.step_s,
        "gains": gains,
        "without": plans,
        "seconds": time.perf_counter() - started,
    }


def inputs_of(row: Row, tables: Path, folder: Path) -> tuple[Config, ModelSpec, CostModel, SampleShapes]:
    path = folder / "config.yaml"

    def write_config(*_: object) -> Path:
        values = {
            "model": {"family": FAMILIES[row.preset], "preset": row.preset, **row.model},
            "cluster": {
                "num_nodes": row.nodes,
                "devices_per_node": row.per_node,
                "intra_node_gbps": row.intra_gbps,
                "inter_node_gbps": row.inter_gbps,
                "device": "cuda",
                "device_model": row.device,
                "memory_gib": row.memory_gib,
            },
            "costs": {"source": "analytic"},
            "train": {"precision": "bf16", "global_batch_size": row.batch},
        }
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    planner.write_config = write_config
    planner.SHARES = row.shares
    if not (folder / f"{row.preset}.shapes.duckdb").exists():
        planner.write_mix(tables, folder, row.preset)
    if not (folder / f"{row.preset}.costs.duckdb").exists():
        planner.write_costs(folder, row.preset)
    return planner.read_inputs(folder, row.preset, 0, 0)


def fastest(inputs, within: PlanConfig) -> Candidate | str:
    """The fastest plan of a space, or why nothing fits."""
    try:
        return search_plans(*inputs, within=within).best
    except UserError as error:
        return str(error)


def values_of(plan: Plan) -> list[tuple[str, str]]:
    """The plan's values as keys of `PlanConfig`."""
    values = [("placements", plan.placement), ("schedules", plan.schedule)]
    shardings = {grid.sharding for grid in plan.grids if grid.sharding in EVERYTHING.shardings}
    return values + [("shardings", name) for name in sorted(shardings)]


def order_gain(plan: Plan, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> float:
    """How much longer the mean step is with balanced groups as they come than with the small ones at both ends."""
    pricer = pricer_of(plan, config, spec, costs)
    batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
    steps_s = {}
    for policy in (LPT, LPT_ORDERED):
        system = System(name=policy.name, plans=lambda *_: [], policy=policy)
        steps = [scheduled_by(system, pricer, samples.take(batches[step]), config.seed, step) for step in range(4)]
        steps_s[policy.name] = sum(own.step_s for own in steps)
    return steps_s[LPT.name] / steps_s[LPT_ORDERED.name] - 1


def print_row(found: dict) -> None:
    print(f"\n{found['row']}", flush=True)
    if "why" in found:
        print(f"  nothing fits: {found['why']}", flush=True)
        return
    print(f"  {found['step_s']:.3f} s, searched in {found['seconds']:.0f} s: {found['plan']}")
    for value, gain in found["gains"].items():
        said = gain if isinstance(gain, str) else f"{gain:.1%} longer"
        print(f"    without {value:<18} {said:<14} {found['without'].get(value, '')}", flush=True)


def print_largest(found: list[dict]) -> None:
    print("\nthe largest gain of each value, and where")
    gains = [(value, gain, row["row"]) for row in found for value, gain in row.get("gains", {}).items()]
    for value in [*EVERYTHING.placements, *EVERYTHING.schedules, *EVERYTHING.shardings, "order"]:
        numbers = [(gain, row) for name, gain, row in gains if name == value and not isinstance(gain, str)]
        only = [row for name, gain, row in gains if name == value and isinstance(gain, str)]
        most, where = max(numbers, default=(0.0, "no row's fastest plan has it"))
        print(f"  {value:<18} {most:7.1%}  {where}" + (f"; nothing else fits in {len(only)} rows" if only else ""))


if __name__ == "__main__":
    main()
