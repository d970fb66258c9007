"""Where a run begins: at its last checkpoint, or at the start, with what another run left moved out of the way."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dflop.config import TrainConfig
from dflop.training.checkpoint import find_checkpoint, load_checkpoint, set_aside
from dflop.training.observations import Observations
from dflop.training.rank_model import RankModel

__all__ = ["RunFiles", "take_up"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """What training reads, and the folder it writes to.

    `run_digest` tells whose checkpoints it may resume, `measured_on` the name of the device that the costs were
    measured on (None for analytic ones).
    """

    shapes: Path
    costs: Path
    plan: Path
    out: Path
    run_digest: str
    measured_on: str | None

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


def take_up(config: TrainConfig, files: RunFiles, model: RankModel, observations: Observations) -> tuple[int, int]:
    """The step to go on with, and how often the run was taken up again; every rank must call this.

    Afterwards the model is as its last checkpoint has it, and what was written of later steps is gone.
    """
    is_main = dist.get_rank() == 0
    found = find_checkpoint(files.checkpoints) if config.resume == "auto" else None
    usable = found is not None and found[1]["run_digest"] == files.run_digest
    usable = usable and found[1]["step"] <= config.steps
    dist.barrier()
    if not usable:
        if is_main:
            if files.checkpoints.exists():
                aside = set_aside(files.checkpoints)
                print(f"dflop: checkpoints of another run or of a longer one were moved to {aside}", flush=True)
            files.metrics.unlink(missing_ok=True)
            observations.clear()
        dist.barrier()
        return 0, 0
    path, run = found
    load_checkpoint(path, model.nodes)
    if is_main:
        lines = files.metrics.read_text(encoding="utf-8").splitlines() if files.metrics.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] < run["step"]]
        files.metrics.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        observations.forget_from(run["step"])
        print(f"dflop: going on from {path}", flush=True)
    dist.barrier()
    return run["step"], run["restarts"] + 1
