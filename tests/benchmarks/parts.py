"""What is trained, on this machine's clock: our plan beside plain DDP with the same frozen parts and adapters.

    python tests/benchmarks/parts.py [--steps 12] [--only TEXT] [--keep FOLDER]

The demo's data and its tiny model on two CPU processes. For each choice of what is trained, costs are measured, a plan
is searched, and our step and DDP's are trained in turns on the same batches, loaded before the clock starts
(`dflop compare --measure`). DDP is as a careful user writes it: frozen parameters ask for no gradients, adapters are
layers of the package peft inside transformers' own, and a rank without a picture encodes a blank one, so that DDP need
not look for unused parameters.

Ratios are over ours, medians step by step. `groups` is our plan with random groups of samples: what balance brings,
measured and predicted. `core` is DDP's busiest core over ours, which other work on the machine changes less. Below each
row stands the memory of the rank that holds most, predicted over tracked (`dflop check-plan`).

With --keep what is made stays in FOLDER, and the same command measures steps alone.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import polars as pl
import yaml

from dflop.checks.of_plan import MadeUpLoad
from dflop.checks.of_plan.memory import CheckedRank, check_rank
from dflop.checks.side_by_side import OURS_AT_RANDOM
from dflop.comparison import OURS
from dflop.config import load_config
from dflop.costs import CostModel
from dflop.plan import load_plan

REPOSITORY = Path(__file__).parents[2]
TRAINED = {
    "projector": {"train": ["projector"]},
    "projector and LLM": {"train": ["projector", "llm"]},
    "last 2 of 4 layers, head": {"train": ["llm.layers.[2-3]", "llm.norm", "llm.head"]},
    "LoRA 8, projector": {"train": ["projector"], "lora": {"rank": 8}},
    "everything": {},
}
QUICK = {"costs": {"repeats": 3, "time_budget_s": 10}, "schedule": {"time_limit_s": 0.2}}
DDP = "DDP"
LOAD = MadeUpLoad(num_pictures=3, picture_side=168, text_tokens=800)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps that count, behind three that do not")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where runs are made and stay")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores; python {' '.join(sys.argv)}\n")
    print("   ours  over predicted    DDP   core  groups  predicted  trained: plan", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for number, (name, model) in enumerate(TRAINED.items()):
            if arguments.only in name:
                print_row(name, *measured(folder, f"parts-{number}", model, arguments.steps))


def measured(folder: Path, run: str, model: dict, num_steps: int) -> tuple[dict[str, dict], CheckedRank]:
    """The measured table by name of the row, and the fullest rank's memory."""
    (folder / f"{run}.yaml").write_text(yaml.safe_dump(QUICK | {"run": run, "model": model}), encoding="utf-8")
    results, workflow = folder / "results" / run, REPOSITORY / "workflow/Snakefile"
    configs = [str(REPOSITORY / "config/config.yaml"), f"{run}.yaml"]
    command(
        folder,
        *("snakemake", "--snakefile", str(workflow), "--cores", "2", "--cache", "profile_costs", "profile_links"),
        *("--configfile", *configs, "--", f"results/{run}/plan.yaml"),
    )
    rows = ("--row", DDP, "--row", OURS_AT_RANDOM)
    command(folder, "dflop.cli", "compare", run, "--measure", "--steps", str(num_steps), *rows)
    table = pl.read_parquet(results / "comparison-measured.parquet")
    config, costs = load_config(results / "config.yaml"), CostModel.load(results / "costs.duckdb")
    checked = check_rank(config, load_plan(results / "plan.yaml"), costs, LOAD, None)
    return {row["name"]: row for row in table.to_dicts()}, checked


def command(folder: Path, *words: str) -> None:
    """Run a Python module as a command."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")


def print_row(name: str, rows: dict[str, dict], checked: CheckedRank) -> None:
    ours, at_random = rows[OURS], rows[OURS_AT_RANDOM]
    core = rows[DDP]["busiest_core_s"] / ours["busiest_core_s"]
    print(
        f"{ours['measured_s']:6.3f}s {ours['measured_over_predicted']:15.3f} {rows[DDP]['measured_over_ours']:6.3f} "
        f"{core:6.3f} {at_random['measured_over_ours']:7.3f} "
        f"{at_random['step_s'] / ours['step_s']:10.3f}  {name}: {ours['plan']}"
    )
    predicted, tracked = checked.predicted, checked.tracked
    parts = [f"{part} {size / tracked[part]:.3f}" for part, size in predicted.items() if tracked[part]]
    print(f"{'':10}memory {sum(predicted.values()) / sum(tracked.values()):.3f}: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
