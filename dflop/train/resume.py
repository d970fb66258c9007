"""Where a run begins: at its last checkpoint, or at the start. In that case another run's outputs are moved aside."""

import sys
from pathlib import Path

import torch.distributed as dist

from dflop.base import UserError
from dflop.config import TrainConfig
from dflop.train.checkpoint import load_checkpoint
from dflop.train.checkpoint_files import Damaged, checkpoints_in, damage_in, has_damaged, move_aside, read_run
from dflop.train.generation import Generation
from dflop.train.metrics import mend_metrics
from dflop.train.observations import Observations
from dflop.train.rank_model import RankModel
from dflop.train.run_folder import RunFiles, clear_start, set_aside, set_observed_aside

__all__ = ["take_up"]


def take_up(
    config: TrainConfig,
    files: RunFiles,
    model: RankModel,
    observations: Observations,
    group: dist.ProcessGroup | None = None,
) -> tuple[int, int]:
    """Resume a run, or begin a new one. Returns the step to go on with, and how often the run has been resumed; every
    rank must call this. Ranks wait for each other's files over `group`, whose time limit must fit a slow file system.

    Afterwards the model is that of the last whole checkpoint, and the outputs of later steps are removed.

    Raises:
        UserError: when the checkpoint lacks values that a rank needs, or a run that is to be resumed cannot be.
    """
    is_main = dist.get_rank() == 0
    found, why_anew = _find_whole(config, files, group)
    if found is None:
        if why_anew and config.resume == "require":
            raise UserError(f"`train.resume` is require, and {why_anew} in {files.checkpoints}; see `damaged-…` there")
        if is_main and why_anew:
            aside = set_aside(files.out)
            print(f"dflop: a new run begins: {why_anew}; what the earlier one left was {aside}", flush=True)
        elif is_main:
            clear_start(files.out)
        dist.barrier(group)
        return 0, 0
    path, run = found
    load_checkpoint(path, model.nodes, group)
    if is_main:
        mend_metrics(files.metrics, before_step=run["step"])
        observations.forget_from(run["step"])
        if said := files.generation.otherwise_left_out(Generation.of_run(run)):
            print(f"dflop: warning: from step {run['step'] + 1} on {said}", file=sys.stderr, flush=True)
        if Generation.of_run(run).prices != files.generation.prices:
            aside = set_observed_aside(files.out)
            print(
                f"dflop: costs or plan changed at step {run['step']}: what was observed before was {aside}", flush=True
            )
        print(f"dflop: going on from {path}", flush=True)
    dist.barrier(group)
    return run["step"], run["restarts"] + 1


def _find_whole(
    config: TrainConfig, files: RunFiles, group: dist.ProcessGroup | None
) -> tuple[tuple[Path, dict] | None, str | None]:
    """The latest whole checkpoint, with the content of its `run.json`. For a new run None, and the reason if there are
    checkpoints.

    Later ones that are damaged are moved aside. The ranks divide the files to be checked, and get the same result.
    """
    while True:
        looked = [_look(files.checkpoints), has_damaged(files.checkpoints)] if dist.get_rank() == 0 else [None, None]
        dist.broadcast_object_list(looked, group=group)
        if (latest := looked[0]) is None:
            return None, "none of its checkpoints is whole" if looked[1] else None
        path, run, damage = latest
        if damage is None:
            if why_anew := _why_anew(config, files.generation, run):
                return None, why_anew
            damage = _damage_that_any_finds(path, group)
        if damage is None:
            return (path, run), None
        if dist.get_rank() == 0:
            aside = move_aside(path)
            print(
                f"dflop: warning: {path} is damaged: {damage}; it was moved to {aside}, and the one before is taken",
                file=sys.stderr,
                flush=True,
            )


def _look(folder: Path) -> tuple[Path, dict, str | None] | None:
    """The latest checkpoint, the content of its `run.json`, and why that cannot be read, if so."""
    found = checkpoints_in(folder)
    if not found:
        return None
    try:
        return found[-1], read_run(found[-1]), None
    except Damaged as damage:
        return found[-1], {}, str(damage)


def _damage_that_any_finds(checkpoint: Path, group: dist.ProcessGroup | None) -> str | None:
    num_ranks = dist.get_world_size()
    damages: list[str | None] = [None] * num_ranks
    dist.all_gather_object(damages, damage_in(checkpoint, dist.get_rank(), num_ranks), group)
    return next((damage for damage in damages if damage), None)


def _why_anew(config: TrainConfig, generation: Generation, run: dict) -> str | None:
    """Why the run of a checkpoint is not resumed; None if it is."""
    if config.resume == "never":
        return "`train.resume` is never"
    return ", ".join(generation.changes_since(Generation.of_run(run))) or None
