"""Where a run begins: at its last checkpoint, or at the start, with what another run left moved out of the way."""

import json

import torch.distributed as dist

from dflop.config import TrainConfig
from dflop.training.checkpoint import load_checkpoint
from dflop.training.generation import Generation
from dflop.training.observations import Observations
from dflop.training.rank_model import RankModel
from dflop.training.run_folder import OBSERVED, RunFiles, clear_start, find_checkpoint, set_aside

__all__ = ["take_up"]


def take_up(config: TrainConfig, files: RunFiles, model: RankModel, observations: Observations) -> tuple[int, int]:
    """The step to go on with, and how often the run was taken up again; every rank must call this.

    Afterwards the model is as its last checkpoint has it, and what was written of later steps is gone.
    """
    is_main = dist.get_rank() == 0
    found = find_checkpoint(files.checkpoints)
    why_anew = found and _why_anew(config, files.generation, found[1])
    dist.barrier()  # all have looked before anything is moved
    if found is None or why_anew:
        if is_main and why_anew:
            aside = set_aside(files.out)
            print(f"dflop: a new run begins: {why_anew}; what the earlier one left was {aside}", flush=True)
        elif is_main:
            clear_start(files.out)
        dist.barrier()
        return 0, 0
    path, run = found
    load_checkpoint(path, model.nodes)
    if is_main:
        _forget_from(run["step"], files, observations)
        if Generation.of_run(run).prices != files.generation.prices:
            aside = set_aside(files.out, OBSERVED)
            print(
                f"dflop: costs or plan changed at step {run['step']}: what was observed before was {aside}", flush=True
            )
        print(f"dflop: going on from {path}", flush=True)
    dist.barrier()
    return run["step"], run["restarts"] + 1


def _why_anew(config: TrainConfig, generation: Generation, run: dict) -> str | None:
    """Why the run that left a checkpoint is not taken up; None where it is."""
    if config.resume == "never":
        return "`train.resume` is never"
    if changes := generation.changes_since(Generation.of_run(run)):
        return ", ".join(changes)
    if run["step"] > config.steps:
        return f"the last checkpoint is of step {run['step']} and `train.steps` is {config.steps}"
    return None


def _forget_from(num_steps: int, files: RunFiles, observations: Observations) -> None:
    lines = files.metrics.read_text(encoding="utf-8").splitlines() if files.metrics.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] < num_steps]
    files.metrics.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    observations.forget_from(num_steps)
