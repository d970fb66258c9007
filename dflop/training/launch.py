"""Starting a training run: torchrun over the plan's ranks, and what is left to do when they are done.

This file imports no torch. `python -m dflop.training.rank` is what torchrun starts on every rank.
"""

import json
import math
import statistics
from collections import Counter
from pathlib import Path

import polars as pl

from dflop.balancing import without_cbc
from dflop.config import Config, select_keys
from dflop.models import check_runnable
from dflop.pipeline import Plan, load_plan, why_not_runnable
from dflop.pricing import (
    Learner,
    is_stale,
    read_learned,
    stale_share,
)
from dflop.runtime import UserError, written_whole
from dflop.runtime.commands import COMMANDS
from dflop.runtime.torchrun import run_ranks
from dflop.training.observations import CORRECTIONS_FILE, NUM_WARMUP_STEPS

__all__ = ["check_devices", "check_plan", "launch_ranks", "summarise", "what_to_rerun"]


def launch_ranks(config: Config, *, plan: Path, arguments: dict[str, str | None]) -> None:
    """Run torchrun to its end.

    Raises:
        UserError: when the model's family or the plan cannot be trained, the plan is for other devices than the
            config's, or a rank failed.
    """
    check_runnable(config.model.family)
    loaded = load_plan(plan)
    check_plan(plan, loaded)
    check_devices(config, loaded)
    per_node = config.cluster.devices_per_node
    if loaded.world_size < per_node:
        per_node = loaded.world_size
    request = {"config": select_keys(config, COMMANDS["train"].reads), **arguments}
    code, stopped = run_ranks(
        "dflop.training.rank", request, config.cluster, num_nodes=config.cluster.num_nodes, per_node=per_node
    )
    if code:
        why = (
            "was stopped by SIGTERM"
            if stopped
            else f"ended early (torchrun's exit code {code}); the reason stands above"
        )
        checkpoints = sorted((Path(arguments["out"]) / "checkpoints").glob("step-*"))
        onward = f"; the same command goes on from {checkpoints[-1]}" if checkpoints else ""
        raise UserError(f"training {why}{onward}")


def check_plan(path: Path, plan: Plan) -> None:
    """Raise `UserError` when a plan, read from `path`, cannot be trained today."""
    if why := why_not_runnable(plan):
        raise UserError(f"{path}: {why}")


def check_devices(config: Config, plan: Plan) -> None:
    """The plan must be for the configured devices."""
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


def summarise(
    config: Config, out: Path, observations: pl.DataFrame, *, baselines: dict[str, str], num_left_out: int
) -> dict[str, object]:
    """Write `summary.json`, the last file of a run; returns what it holds.

    `baselines` says of what others would run how long it would take.
    """
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    learner = read_learned(out / "observations" / CORRECTIONS_FILE)
    last = max((out / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    run = json.loads((last / "run.json").read_text(encoding="utf-8"))
    steady = steps[NUM_WARMUP_STEPS:] or steps
    steady_s = sum(step["step_s"] for step in steady)
    at_each_end = max(1, min(5, len(steps) // 2))
    summary = {
        "num_steps": len(steps),
        "first_loss": statistics.fmean(step["loss"] for step in steps[:at_each_end]),
        "final_loss": statistics.fmean(step["loss"] for step in steps[-at_each_end:]),
        "train_s": sum(step["step_s"] for step in steps),
        "samples_per_s": sum(step["num_samples"] for step in steady) / steady_s,
        "tokens_per_s": sum(step["num_tokens"] for step in steady) / steady_s,
        "step_s": statistics.median(step["step_s"] for step in steady),
        "pipeline_s": statistics.median(step["pipeline_s"] for step in steady),
        "predicted_step_s": statistics.median(step["predicted_step_s"] for step in steady),
        "idle": statistics.fmean(step["idle"] for step in steady),
        "total_schedule_wait_s": sum(step["wait_s"] for step in steps),
        "total_data_wait_s": sum(step["data_wait_s"] for step in steps),
        # Steps of which a part was predicted for loads outside of what was measured.
        "num_extrapolated_steps": sum(step.get("extrapolated", 0.0) > 0 for step in steps),
        "extrapolated": statistics.fmean(step.get("extrapolated", 0.0) for step in steps),
        # Assignments that were faster than those taken, and that memory would not have held.
        "num_beyond_memory": sum(step.get("num_beyond_memory", 0) for step in steps),
        "num_left_out": num_left_out,  # samples that no device could hold
        "num_unreadable": sum(step["num_unreadable"] for step in steps),
        "restarts": run["restarts"],
        "peak_memory_bytes": run.get("peak_memory_bytes", {}),
        "measured_over_predicted": {
            f"{module} {direction}": ratio
            for module, direction, ratio in observations.filter(~pl.col("warmup") & (pl.col("pass") != "sync"))
            .group_by("module", "pass")
            .agg(pl.col("seconds").sum() / pl.col("predicted_s").sum())
            .sort("module", "pass")
            .rows()
        },
        # What others would run, predicted beside the plan that was trained.
        "baselines": baselines,
        "policy": config.schedule.policy,
        # By `lpt` beside another policy went those that the schedule service had no answer to.
        "num_steps_by_policy": dict(Counter(step["policy"] for step in steps)),
        "num_steps_without_cbc": sum(without_cbc(step["policy_status"]) for step in steps),
        "correction": {
            "mode": config.schedule.correction,
            "num_learned_steps": learner.num_steps,
            "stale_share": stale_share(learner.bins),
            "rerun": what_to_rerun(learner),
        },
    }
    with written_whole(out / "summary.json") as path:
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def what_to_rerun(learner: Learner) -> str | None:
    """One line for who trained with costs that most of the learned shape bins contradict; None where they hold."""
    if not is_stale(learner.bins):
        return None
    worst: dict[str, float] = {}
    for key, learned in sorted(learner.bins.items()):
        if learned.counts:
            worst[key.module] = max(worst.get(key.module, 0.0), learned.log_ratio, key=abs)
    ratios = ", ".join(f"{module} up to {math.exp(log_ratio):.2f}x" for module, log_ratio in worst.items())
    return (
        f"the costs look stale: {stale_share(learner.bins):.0%} of the shape bins took over 20 % more or less than "
        f"costs.duckdb says ({ratios}); measure again with `dflop profile-costs` (`snakemake --forcerun "
        "profile_costs`), with nothing else on the devices"
    )
