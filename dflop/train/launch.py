"""Starting a training run: torchrun over the plan's ranks, unless the run is finished.

This file does not import torch. torchrun starts `dflop.train.rank` on every rank.
"""

import signal
import time
from pathlib import Path

from dflop.base import ToBeContinued, UserError
from dflop.base.commands import COMMANDS
from dflop.base.torchrun import check_nodes, is_first_node, run_ranks
from dflop.config import Config, select_keys
from dflop.models import ModelSpec, check_runnable, check_tp, load_model_spec
from dflop.plan import Plan, check_layers, load_plan
from dflop.train.checkpoint_files import find_checkpoint, has_damaged
from dflop.train.generation import Generation

__all__ = ["check_devices", "check_plan", "finished_at", "launch_ranks"]


def launch_ranks(config: Config, *, plan: Path, arguments: dict[str, object]) -> None:
    """Run torchrun to its end.

    Raises:
        UserError: when the model's family or the plan cannot be trained, the plan is for other devices than the
            config's, there are several nodes of GPUs and this runs outside `srun`, a rank failed, or the run was asked
            to stop before its last step.
        ToBeContinued: when this command was asked to stop by a SIGUSR1, as ahead of a time limit, after steps were
            trained.
    """
    check_runnable(config.model.family)
    loaded = load_plan(plan)
    check_plan(plan, loaded, load_model_spec(config.model))
    check_devices(config, loaded)
    check_nodes(config.cluster, config.cluster.num_nodes)
    per_node = config.cluster.devices_per_node
    if loaded.world_size < per_node:
        per_node = loaded.world_size
    checkpoints = Path(arguments["out"]) / "checkpoints"
    before = find_checkpoint(checkpoints)
    request = {"config": select_keys(config, COMMANDS["train"].reads), **arguments}
    if is_first_node(config.cluster):
        num_ranks = per_node * config.cluster.num_nodes
        print(f"{time.strftime('%H:%M:%S')}  {num_ranks} ranks start: {loaded}", flush=True)
    code, stopped = run_ranks(
        "dflop.train.rank",
        request,
        config.cluster,
        num_nodes=config.cluster.num_nodes,
        per_node=per_node,
        asks_first=True,
        shared=Path(arguments["out"]),
    )
    found = find_checkpoint(checkpoints)
    onward = f"; the same command goes on from {found[0]}" if found else ""
    if code:
        after = " after it was asked to stop" if stopped else ""
        raise UserError(f"training ended early{after} (torchrun's exit code {code}); see the reason above{onward}")
    if found and found[1]["step"] < config.train.steps:
        # Ranks may have been asked to stop when this command was not. A run that trains no step must not be continued,
        # as it might be continued forever.
        goes_on = signal.SIGUSR1 in stopped and (before is None or before[1] != found[1])
        raise (ToBeContinued if goes_on else UserError)(
            f"training stopped after step {found[1]['step']} of {config.train.steps}, as asked{onward}"
        )


def check_plan(path: Path, plan: Plan, spec: ModelSpec) -> None:
    """Raise `UserError` when a plan, read from `path`, has no encoder, or does not fit the model."""
    if len(plan.grids) == 1:  # the LLM's first stage takes encoders' features
        raise UserError(
            f"{path}: the plan has 0 encoders and training is for models that have some; use a model with one"
        )
    for grid in plan.grids:
        try:
            check_tp(spec, grid.module, grid.tp)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    check_layers(path, plan, {module.name: module.num_layers for module in spec.modules})


def check_devices(config: Config, plan: Plan) -> None:
    """Raise `UserError` when a plan is not for the configured devices."""
    if config.cluster.num_nodes > 1 and plan.world_size != config.cluster.num_devices:
        raise UserError(
            f"the plan is for {plan.world_size} devices, `cluster` has {config.cluster.num_devices} on "
            f"{config.cluster.num_nodes} nodes; run `dflop plan` again for this cluster"
        )
    if plan.world_size > config.cluster.num_devices:
        raise UserError(
            f"the plan needs {plan.world_size} devices, `cluster` has {config.cluster.num_devices} "
            f"({config.cluster.num_nodes} x {config.cluster.devices_per_node}); run `dflop plan` again for this cluster"
        )


def check_resumable(config: Config, out: Path, generation: Generation, *, steps_are_given: bool) -> None:
    """Check that the run of the last checkpoint can go on, or that a new run may begin in its place. Steps that are not
    given follow from `train.epochs`: where other samples are left out, they may be fewer than were trained.

    Raises:
        UserError: naming what has changed, or that the checkpoint is behind the last step.
    """
    checkpoints = out / "checkpoints"
    found = find_checkpoint(checkpoints)
    if found is None and config.train.resume == "require" and has_damaged(checkpoints):
        raise UserError(
            f"`train.resume` is require, and none of the checkpoints in {checkpoints} is whole; see `damaged-…` there, "
            "and set `train.resume` to auto to begin a new run"
        )
    if found is None or config.train.resume == "never":
        return
    path, run = found
    changes = generation.changes_since(Generation.of_run(run))
    if changes and config.train.resume == "require":
        raise UserError(
            f"`train.resume` is require, and since {path}: {', '.join(changes)}; change it back to go on, or set "
            f"`train.resume` to auto: then a new run begins at step 1, and this one is moved into {out / 'old-N'}"
        )
    if not changes and steps_are_given and run["step"] > config.train.steps:
        raise UserError(
            f"{path} is of step {run['step']}, and `train.steps` is {config.train.steps}: raise it to go on, or set "
            "`train.resume: never` to train anew"
        )


def finished_at(config: Config, out: Path, generation: Generation) -> Path | None:
    """The last checkpoint of a run that has trained all of its steps and written its model; None if work is left."""
    found = find_checkpoint(out / "checkpoints")
    if found is None or config.train.resume == "never" or not (out / "model").is_dir():
        return None
    path, run = found
    is_same = not generation.changes_since(Generation.of_run(run))
    return path if is_same and run["step"] >= config.train.steps else None
