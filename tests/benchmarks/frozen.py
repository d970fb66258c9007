"""What is trained changes the fastest plan: everything, projector and LLM, the projector, the last layers, or LoRA.

    python tests/benchmarks/frozen.py --shapes FOLDER [--nodes 1 8] [--memory-gib 22] [--only TEXT]

LLaVA-OneVision 7B on nodes of 8 H100s, or with --memory-gib of 8 A100s over PCIe with so much of their memory. For each
the fastest plan is searched, and beside it stand the fastest FSDP-style plans of the same parts, with random batches
and with those of our sampler. All steps are predicted, from analytic costs of compiled layers, as the means of four
batches that no plan was chosen on. FOLDER and the mix are `planner.py`'s; tensor parallelism is of 1, 2 or 4.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import gains
import planner

from dflop.comparison.compare import OURS, compare_systems
from dflop.comparison.systems import fsdp_balanced, fsdp_random

PRESET, TP_SIZES = "llava_ov_7b", (1, 2, 4)
TRAINED = {
    "everything": {},
    "projector and LLM": {"train": ["projector", "llm"]},
    "projector": {"train": ["projector"]},
    "last 8 of 28 layers, head": {"train": ["llm.layers.[20-27]", "llm.norm", "llm.head"]},
    "LoRA 16, projector": {"train": ["projector"], "lora": {"rank": 16}},
}
FAST = {"device": "h100-80g", "intra_gbps": 3600, "inter_gbps": 400}
SMALL = {"device": "a100-80g", "intra_gbps": gains.PCIE_GBPS, "inter_gbps": 100 / 8}
SYSTEMS = {"FSDP random": fsdp_random.SYSTEM, "FSDP balanced": fsdp_balanced.SYSTEM}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1])
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    arguments = parser.parse_args()
    planner.TP_SIZES = TP_SIZES
    print(f"python {' '.join(sys.argv)}\n\ndevices   step  GiB  FSDP random  balanced  trained: plan", flush=True)
    about = SMALL | {"memory_gib": arguments.memory_gib} if arguments.memory_gib else FAST
    with tempfile.TemporaryDirectory() as folder:
        for name, model in TRAINED.items():
            if arguments.only not in name:
                continue
            (Path(folder) / f"{PRESET}.costs.duckdb").unlink(missing_ok=True)  # those of other parts
            for nodes in arguments.nodes:
                row = gains.Row(preset=PRESET, nodes=nodes, batch=64 * nodes, model=model, **about)
                print_row(name, row, arguments.shapes, Path(folder))


def print_row(name: str, row: gains.Row, tables: Path, folder: Path) -> None:
    start = f"{row.nodes * row.per_node:7}"
    inputs = gains.inputs_of(row, tables, folder)
    try:
        rows = {own.name: own for own in compare_systems(*inputs, num_batches=4, systems=tuple(SYSTEMS.values()))}
    except gains.UserError as error:
        print(f"{start}  nothing fits  {name}: {error}", flush=True)
        return
    ours = rows[OURS]
    others = [f"{rows[own.name].step_s / ours.step_s:10.2f}x" if rows[own.name].plan else f"{'-':>11}"
              for own in SYSTEMS.values()]  # fmt: skip
    print(f"{start} {ours.step_s:6.3f}s {ours.memory_bytes / 2**30:4.0f} {' '.join(others)}  {name}: {ours.plan}")
    for system in SYSTEMS.values():
        print(f"{'':46}{system.name}: {rows[system.name].plan or rows[system.name].why_not}", flush=True)


if __name__ == "__main__":
    main()
