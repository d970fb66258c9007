"""Steps of a small real model, planned from what was measured on this card: the clock beside the prediction.

It runs the workflow's commands one after the other, from the demo's records to a training, as a user would.
"""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from tests.gpu.check import Figures, Setting

__all__ = ["as_predicted"]

_NUM_RECORDS, _BATCH_SIZE, _NUM_STEPS = 320, 16, 16


def as_predicted(setting: Setting) -> Figures:
    """Measured over predicted: seconds of a step, and the bytes that its tensors take at most."""
    commands = with_shapes(setting)
    folder, config, shapes = commands.folder, commands.config, ("--shapes", commands.folder / "shapes.duckdb")
    measured = [folder / "costs" / f"{module}.tp1.parquet" for module in ("vision", "llm")]
    for path in measured:
        module = ("--module", path.name.split(".")[0])
        commands.run("profile-costs", *config, *module, "--bounds", folder / "load_bounds.json", "--out", path)
    costs, plan = ("--costs", folder / "costs.duckdb"), folder / "plan.yaml"
    commands.run("fit-costs", *measured, "--out", folder / "costs.duckdb")
    commands.run("plan", *config, *shapes, *costs, "--out", plan)
    commands.run("train", *config, *shapes, *costs, "--plan", plan, "--out", folder / "train")
    summary = json.loads((folder / "train/summary.json").read_text())
    print(json.dumps(summary, indent=1), plan.read_text(), sep="\n")
    return _figures(summary, yaml.safe_load(plan.read_text())["predicted"])


def with_shapes(setting: Setting) -> "_Commands":
    """The commands, once the demo's records are drawn and their shapes are read, which needs no GPU."""
    folder = setting.folder / "step"
    commands = _Commands(folder, setting)
    if (folder / "shapes.duckdb").exists():
        return commands
    commands.run("demo-data", "--out", folder / "data", "--records", 40 if setting.is_tiny else _NUM_RECORDS)
    for line in commands.run("list-shards", *commands.config).splitlines():
        shard = line.split()[0]
        out = folder / "shapes" / f"{shard}.parquet"
        commands.run("profile-shapes", *commands.config, "--shard", shard, "--out", out)
    merged = ("--shapes", folder / "shapes", "--out", folder / "shapes.duckdb")
    commands.run("merge-shapes", *commands.config, *merged, "--bounds", folder / "load_bounds.json")
    return commands


class _Commands:
    """Commands of dflop with one config, whose output goes to this process's own."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self.folder = folder
        for name in ("data", "shapes", "costs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        is_tiny = setting.is_tiny
        config = {
            "run": "step",
            "data": {"sources": [{"path": str(folder / "data/train.json")}], "max_llm_tokens": 8192},
            "model": {"family": "llava_onevision", "preset": "tiny" if is_tiny else "llava_ov_0.5b"},
            "cluster": {
                "device": setting.device,
                "devices_per_node": 1,
                "num_nodes": 1,
                "memory_gib": 16 if is_tiny else 70,
            },
            "costs": {"repeats": 3, "time_budget_s": 1 if is_tiny else 15},
            "schedule": {"policy": "lpt", "correction": "off"},
            "train": {
                "global_batch_size": 8 if is_tiny else _BATCH_SIZE,
                "steps": _NUM_STEPS,
                "checkpoint_every": 1000,
                "precision": "fp32" if setting.device == "cpu" else "bf16",
                "tensorboard": "off",
            },
        }
        self.config = ("--config", json.dumps(config))

    def run(self, *arguments: object) -> str:
        """What the command prints to its standard output.

        Raises:
            subprocess.CalledProcessError: if it fails; what it printed is in the log.
        """
        command = [sys.executable, "-m", "dflop.cli", *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(f"$ dflop {arguments[0]}\n{done.stdout}", flush=True)
        done.check_returncode()
        return done.stdout


def _figures(summary: dict, predicted: dict) -> Figures:
    parts = {f"measured over predicted, {part}": ratio for part, ratio in summary["measured_over_predicted"].items()}
    return {
        "measured over predicted seconds of a step": summary["step_s"] / summary["predicted_step_s"],
        "seconds of a step": summary["step_s"],
        "tokens a second": summary["tokens_per_s"],
        **parts,
        "share of seconds that compute": summary["time_split"]["share"]["computing"],
        "what bounds the run": summary["time_split"]["bound_by"],
        "measured over predicted bytes": max(summary["peak_memory_bytes"].values())
        / max(predicted["memory_bytes"].values()),
        "functions that run eager": float(summary["num_eager"]),
        "attention": str(summary["attention"]),
        "last loss over the first": summary["mean_final_loss"] / summary["mean_first_loss"],
    }
