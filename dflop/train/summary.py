"""`summary.json`, the last file of a run: its results, and whether the costs that it was planned by are still right."""

import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl

from dflop.balance import without_cbc
from dflop.base import UserError, written_whole
from dflop.config import Config
from dflop.schedule import Learner, is_stale, read_learned, stale_share
from dflop.train.bottleneck import time_split
from dflop.train.checkpoint_files import find_checkpoint
from dflop.train.generation import Generation
from dflop.train.metrics import mend_metrics
from dflop.train.observations import CORRECTIONS_FILE, NUM_WARMUP_STEPS, Merged
from dflop.train.run_folder import LAST_SUMMARY

__all__ = ["summarise", "what_to_rerun"]


def summarise(
    config: Config,
    out: Path,
    merged: Merged,
    generation: Generation,
    *,
    baselines: dict[str, dict[str, object]],
    num_left_out: int,
) -> dict[str, Any]:
    """Write `summary.json`; returns its content.

    Losses and counts are of all steps. Measurements, and comparisons with predictions, are of the steps of the last
    generation that was trained. This may be an earlier one than `generation`, which belongs to the present costs and
    plan. `baselines` has the predicted step times of the baselines, by name.

    Raises:
        UserError: when the folder holds no steps, or no checkpoint.
    """
    steps = mend_metrics(out / "metrics.jsonl")
    found = find_checkpoint(out / "checkpoints")
    if not steps or found is None:
        raise UserError(f"{out} holds no steps, or no checkpoint, of its run; train it anew with `train.resume=never`")
    _, run = found
    trained = Generation.of_run(run)
    counted = [step for step in steps if step.get("generation") == trained.prices] or steps
    learner = read_learned(out / "observations" / CORRECTIONS_FILE)
    summary = {
        "generation": trained.digest,
        "prices": trained.prices,  # a digest of the costs and the plan with which the run was trained
        "num_steps": len(steps),
        **_losses(steps),
        "evaluation": _evaluation(steps),
        "train_s": sum(step["step_s"] for step in steps),
        **_speed(counted[NUM_WARMUP_STEPS:] or counted),
        "total_schedule_wait_s": sum(step["wait_s"] for step in steps),
        "total_data_wait_s": sum(step["data_wait_s"] for step in steps),
        # Steps with microbatches whose loads are outside the measured range.
        "num_extrapolated_steps": sum(step.get("extrapolated", 0.0) > 0 for step in counted),
        "extrapolated": statistics.fmean(step.get("extrapolated", 0.0) for step in counted),
        # Assignments that were faster than the chosen ones, but did not fit into memory.
        "num_beyond_memory": sum(step.get("num_beyond_memory", 0) for step in steps),
        "num_left_out": num_left_out,  # samples that no device could hold
        "num_left_out_of_batches": sum(step.get("num_left_out", 0) for step in steps),
        "num_unreadable": sum(step["num_unreadable"] for step in steps),
        "num_undecodable": sum(step.get("num_undecodable", 0) for step in steps),
        # Functions of layers, over all ranks, that could not be compiled, or only for some of their inputs.
        "num_eager": counted[-1].get("num_eager", 0),
        "restarts": run["restarts"],
        "attention": run.get("attention"),  # the kernel that computed it
        "peak_memory_bytes": run.get("peak_memory_bytes", {}),
        "peak_allocated_bytes": run.get("peak_allocated_bytes", {}),  # of GPUs only
        "measured_over_predicted": _measured_over_predicted(merged.observations),
        # Where the time of the steps went, and what bounds the run.
        "time_split": time_split(config, merged),
        # The baselines' predictions, to compare the trained plan with.
        "baselines": baselines,
        "policy": config.schedule.policy,
        # If the policy is another one, the steps with `lpt` are those for which the schedule service had no schedule.
        "num_steps_by_policy": dict(Counter(step["policy"] for step in steps)),
        "num_steps_without_cbc": sum(without_cbc(step["policy_status"]) for step in steps),
        # Steps that were trained with other costs say nothing about the present ones.
        "correction": _correction(config, learner, is_of_now=trained.prices == generation.prices),
    }
    for name in (LAST_SUMMARY, "summary.json"):
        with written_whole(out / name) as path:
            path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _correction(config: Config, learner: Learner, *, is_of_now: bool) -> dict[str, Any]:
    return {
        "mode": config.schedule.correction,
        "num_learned_steps": learner.num_steps,
        "stale_share": stale_share(learner.bins),
        "rerun": what_to_rerun(learner) if is_of_now else None,
    }


def _losses(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The losses of the first and last step, and means over a few steps at each end, which vary less with a batch."""
    losses = [step["loss"] for step in steps]
    num_averaged = max(1, min(5, len(losses) // 2))
    return {
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "mean_first_loss": statistics.fmean(losses[:num_averaged]),
        "mean_final_loss": statistics.fmean(losses[-num_averaged:]),
        "num_averaged_losses": num_averaged,
    }


def _evaluation(steps: list[dict[str, Any]]) -> dict[str, float] | None:
    """The losses of the evaluation set, and the step (from 0) after which the best one was; None if there is no set."""
    losses = {step["step"]: step["evaluation_loss"] for step in steps if step.get("evaluation_loss") is not None}
    if not losses:
        return None
    best = min(losses, key=losses.get)
    return {
        "first_loss": next(iter(losses.values())),
        "final_loss": losses[max(losses)],
        "best_loss": losses[best],
        "best_step": best,
        "num_evaluations": len(losses),
        "evaluation_s": sum(step.get("evaluation_s") or 0.0 for step in steps),
    }


def _speed(steady: list[dict[str, Any]]) -> dict[str, float]:
    steady_s = sum(step["step_s"] for step in steady)
    return {
        "samples_per_s": sum(step["num_samples"] for step in steady) / steady_s,
        "tokens_per_s": sum(step["num_tokens"] for step in steady) / steady_s,
        "step_s": statistics.median(step["step_s"] for step in steady),
        "pipeline_s": statistics.median(step["pipeline_s"] for step in steady),
        "predicted_step_s": statistics.median(step["predicted_step_s"] for step in steady),
        "idle": statistics.fmean(step["idle"] for step in steady),
    }


def _measured_over_predicted(observations: pl.DataFrame) -> dict[str, float]:
    return {
        f"{module} {direction}": ratio
        for module, direction, ratio in observations.filter(~pl.col("warmup") & pl.col("predicted_s").is_not_null())
        .group_by("module", "pass")
        .agg(pl.col("seconds").sum() / pl.col("predicted_s").sum())
        .sort("module", "pass")
        .rows()
    }


def what_to_rerun(learner: Learner) -> str | None:
    """One line on what to measure again, if the learned corrections contradict the costs in too many shape bins; else
    None."""
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
