"""The whole trainer on one device: a run that is killed and resumed is the run that was not, evaluated and exported.

Kernels of backward may add in any order on a GPU, so two equal runs may differ. A resumed one may differ as much.
"""

import json
import math
import os
import signal
import time
from pathlib import Path

import duckdb
from small_runs import prepare
from training_runs import end_run, plan_file, process_of_rank, start_run, wait_for_steps

from dflop.demo import make_demo_data
from dflop.models import load_runtime
from tests.gpu.check import Figures, Setting

__all__ = ["killed_and_resumed"]

_FAMILY = "llava_onevision"


def killed_and_resumed(setting: Setting) -> Figures:
    """Differences of losses between runs, and what else a run leaves behind."""
    runs = _Runs(setting)
    whole, again = runs.run("whole"), runs.run("again")
    ended_s = runs.killed("parts", 6 if setting.is_tiny else 18)
    parts = runs.run("parts")
    apart, usual = _apart(parts, whole), _apart(again, whole)
    figures = {
        "losses of an equal run, largest difference": usual,
        "losses of a resumed run, largest difference": apart,
        "losses of a resumed run, beyond what equal runs differ": max(0.0, apart - 3 * usual),
        "steps that are missing": float(runs.num_steps - len(parts)),
        "restarts": float(runs.summary("parts")["restarts"]),
        "seconds until a killed run has ended": ended_s,
        "last loss over the first": whole[-1]["loss"] / whole[0]["loss"],
        "evaluation loss": parts[-1]["evaluation_loss"] or math.nan,
        "weights that from_pretrained does not find": float(_num_missing(runs.folder / "parts" / "model")),
    }
    if setting.device == "cuda" and not setting.is_fast:
        compiled = runs.run("compiled", compile="on")
        figures["functions of layers that run eager"] = float(runs.summary("compiled")["num_eager"])
        figures["losses of a compiled run, largest difference"] = _apart(compiled, whole)
    return figures


class _Runs:
    """Runs of one rank over the same data, each in a folder of its name."""

    def __init__(self, setting: Setting) -> None:
        self.folder = setting.folder / "trainer"
        for name in ("data", "run"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        make_demo_data(self.folder / "data", num_records=48)
        made, self._config = prepare(self.folder / "run", [self.folder / "data" / "train.json"], _FAMILY)
        with duckdb.connect(str(made / "shapes.duckdb")) as connection:
            connection.execute("UPDATE samples SET evaluation = true WHERE row % 4 = 1")
        self._config |= {
            "data": self._config["data"] | {"evaluation_share": 0.25},
            "cluster": {"device": setting.device},
            "schedule": {"policy": "lpt", "deterministic": True},
        }
        self._plan = plan_file(made, placement="colocated")
        self.num_steps = 8 if setting.is_tiny else 30
        self._how = {
            "steps": self.num_steps,
            "checkpoint_every": 5,
            "precision": "bf16" if setting.device == "cuda" else "fp32",
            "compile": "off",
            "grad_clip": 1.0,
        }

    def _start(self, name: str, **more: object):
        return start_run(self.folder / "run", self._config, self._plan, self.folder / name, **(self._how | more))

    def run(self, name: str, **more: object) -> list[dict]:
        """Run to the end, or go on to it; the lines of its metrics."""
        out = self.folder / name
        if end_run(self._start(name, **more), out):
            raise RuntimeError((out / "log").read_text())
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def killed(self, name: str, num_steps: int) -> float:
        """Kill a run's rank after so many steps; the seconds until the command has ended."""
        out = self.folder / name
        process = self._start(name)
        wait_for_steps(process, out, num_steps)
        started = time.monotonic()
        os.kill(process_of_rank(0, out), signal.SIGKILL)
        end_run(process, out)
        return time.monotonic() - started

    def summary(self, name: str) -> dict:
        return json.loads((self.folder / name / "summary.json").read_text())


def _apart(ours: list[dict], theirs: list[dict]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(own["loss"] / other["loss"] - 1) for own, other in zip(ours, theirs, strict=True))


def _num_missing(model: Path) -> int:
    """Weights that an exported model lacks."""
    _, about = load_runtime(_FAMILY).architecture.from_pretrained(model, output_loading_info=True)
    return len(about["missing_keys"])
