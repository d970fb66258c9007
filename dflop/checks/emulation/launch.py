"""An emulated run, as its command runs it: check that it is possible, start the ranks, and write the results.

This file does not import torch. An emulated run has a folder of its own: `summary.json`, every line of `metrics.jsonl`
and the `meta` of `observations.duckdb` say `emulated`, and no training run is found or continued there.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from dflop.base import UserError, torchrun, written_whole
from dflop.base.commands import COMMANDS
from dflop.config import ClusterConfig, Config, select_keys, set_steps
from dflop.models import load_model_spec
from dflop.plan import load_plan
from dflop.schedule import BatchScheduler
from dflop.schedule.service import open_scheduler
from dflop.store import read_meta
from dflop.train.launch import check_devices, check_plan
from dflop.train.observations import NUM_WARMUP_STEPS, Merged, merge_observations
from dflop.train.run_folder import clear_start, is_emulated

__all__ = ["MOST_RANKS", "emulate", "emulation_text"]

# The most ranks on a machine with few cores: ranks sleep, but all of them communicate, and each takes a third of a GiB.
MOST_RANKS = 16
_RANKS_PER_CORE = 8
_SECONDS = ("step_s", "pipeline_s", "predicted_step_s")


def emulate(
    config: Config, *, shapes: Path, costs: Path, plan: Path, out: Path, scale: float, meta: dict[str, str]
) -> tuple[dict[str, Any], Merged]:
    """Run the plan's ranks to the end of `train.steps`. Returns the content of `summary.json`, and the observations.

    All predicted seconds are multiplied by `scale`. The scheduler must not learn from emulated times, so
    `schedule.correction` must be off. The outputs of an earlier emulation in `out` are replaced.

    Raises:
        UserError: when the plan has more ranks than this machine can emulate, `out` holds a training run, the plan,
            the costs and the data do not fit together, or a rank failed.
    """
    assert config.schedule.correction == "off"
    loaded = load_plan(plan)
    check_plan(plan, loaded, load_model_spec(config.model))
    check_devices(config, loaded)
    _check_size(loaded.world_size)
    _check_folder(out)
    artifacts = {"shapes": shapes, "costs": costs, "plan": plan}
    scheduler = open_scheduler(config, **artifacts)
    if config.train.epochs is not None:
        set_steps(config, scheduler.batches.steps_in(config.train.epochs))
    with scheduler.open():
        scheduler.check(config.train.steps)
        syncs = _syncs(scheduler)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "observations.duckdb", "trace.json"):
        (out / name).unlink(missing_ok=True)
    clear_start(out)
    request = {name: str(path) for name, path in artifacts.items()}
    request |= {"config": select_keys(config, COMMANDS["train"].reads), "out": str(out)}
    request |= {"scale": scale, **syncs}
    print(f"{time.strftime('%H:%M:%S')}  {loaded.world_size} ranks start, none of which computes: {loaded}", flush=True)
    here = ClusterConfig(devices_per_node=loaded.world_size)  # this machine, and not the emulated cluster
    code, _ = torchrun.run_ranks("dflop.checks.emulation.rank", request, here, num_nodes=1, per_node=loaded.world_size)
    if code:
        raise UserError(f"the emulation ended early (torchrun's exit code {code}); see the reason above")
    merged = merge_observations(
        out / "observations", out / "observations.duckdb", scheduler.left_out, meta | {"emulated": "true"}
    )
    about = {
        "emulated": True,
        "plan": str(loaded),
        "num_ranks": loaded.world_size,
        "policy": config.schedule.policy,
        "global_batch_size": config.train.global_batch_size,
        "scale": scale,
        "costs": read_meta(costs, made_by="fit-costs").get("source", "measured"),
        "num_left_out": len(scheduler.left_out),
    }
    return _summarise(out, about), merged


def emulation_text(summary: dict[str, Any]) -> str:
    """The measured and the predicted times of an emulated run, in a few lines."""
    step, pipeline = summary["measured_over_predicted"], summary["pipeline_over_predicted"]
    slowed = "" if summary["scale"] == 1.0 else f" (all seconds times {summary['scale']:g})"
    return (
        f"emulated, {summary['costs']} costs, policy {summary['policy']}: {summary['num_compared']} steps of "
        f"{summary['num_ranks']} ranks that sleep{slowed}\n"
        f"step: measured {summary['step_s']:.3f} s, predicted {summary['predicted_step_s']:.3f} s; measured over "
        f"predicted: median {step['median']:.3f}, from {step['least']:.3f} to {step['most']:.3f}; of the pipeline "
        f"alone {pipeline['median']:.3f}\n"
        f"idle: measured {summary['idle']:.1%}, predicted {summary['predicted_idle']:.1%}; wait for schedules "
        f"{summary['wait_s'] * 1e3:.1f} ms a step"
    )


def _check_size(num_ranks: int) -> None:
    cores = len(os.sched_getaffinity(0))
    most = max(MOST_RANKS, _RANKS_PER_CORE * cores)
    if num_ranks > most:
        raise UserError(
            f"the plan has {num_ranks} ranks, and this machine's {cores} cores emulate {most} at most; plan for a "
            "smaller cluster (`cluster.num_nodes`, `cluster.devices_per_node`)"
        )


def _check_folder(out: Path) -> None:
    """Raise `UserError` if the folder holds a training run."""
    trained = [name for name in ("checkpoints", "model", "last_summary.json") if (out / name).exists()]
    if (out / "metrics.jsonl").exists() and not is_emulated(out):
        trained.append("metrics.jsonl")
    if trained:
        raise UserError(
            f"{out} holds a training run ({trained[0]}), which is not mixed with an emulated one; give --out a folder "
            "of its own"
        )


def _syncs(scheduler: BatchScheduler) -> dict[str, list[float]]:
    """The seconds of each node's gradient sync and of its early and late parts, [num_nodes], which are the same for all
    batches."""
    pricer = scheduler.pricer
    nothing = 0.0 * pricer.sync_s
    parts = {"early_sync_s": pricer.early_sync_s, "late_sync_s": pricer.late_sync_s}
    hidden = {name: (nothing if seconds is None else seconds).tolist() for name, seconds in parts.items()}
    return hidden | {"sync_s": pricer.sync_s.tolist()}


def _summarise(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Write `summary.json`. The steps after the warm-up are compared with their predictions, or all if there are no
    others."""
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steady = steps[NUM_WARMUP_STEPS:] or steps
    summary = about | {
        "num_steps": len(steps),
        "num_compared": len(steady),
        **{name: statistics.median(step[name] for step in steady) for name in _SECONDS},
        "measured_over_predicted": _spread([step["step_s"] / step["predicted_step_s"] for step in steady]),
        "pipeline_over_predicted": _spread([step["pipeline_s"] / step["predicted_step_s"] for step in steady]),
        **{name: statistics.fmean(step[name] for step in steady) for name in ("idle", "predicted_idle", "wait_s")},
        "num_steps_by_policy": {
            policy: sum(step["policy"] == policy for step in steps)
            for policy in sorted({step["policy"] for step in steps})
        },
    }
    with written_whole(out / "summary.json") as path:
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
