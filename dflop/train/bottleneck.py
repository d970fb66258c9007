"""What bounds a run: where the ranks' time went, and one sentence on the largest wait and how to shorten it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from dflop.config import Config
from dflop.train.observations import Merged
from dflop.train.step_seconds import PARTS

__all__ = ["rank_names", "time_split"]

# Waits of a smaller share of the step are not mentioned, nor is a rank that computes less than this many times as much
# as the others.
_LEAST_SHARE = 0.05
_LEAST_MORE = 1.1
# Waits that are judged by the rank that waits most, because it holds the others up.
_OF_WORST_RANK = ("data", "schedule")


def time_split(config: Config, merged: Merged) -> dict[str, Any] | None:
    """The shares of a step's time, and a sentence on what bounds the run; None if no step after the warm-up was
    observed."""
    steady = merged.step_seconds.filter(~pl.col("warmup"))
    if not len(steady):
        return None
    totals = steady.group_by("rank").agg(pl.col(*(f"{part}_s" for part in PARTS), "step_s").sum()).sort("rank")
    shares = {part: (totals[f"{part}_s"] / totals["step_s"]).to_numpy() for part in PARTS}
    slowest = int((shares["bubble"] + shares["peers"]).argmin())
    return {
        "share": {part: float(share.mean()) for part, share in shares.items()},
        "slowest_rank": {
            "rank": int(totals["rank"][slowest]),
            "share": {part: float(share[slowest]) for part, share in shares.items()},
        },
        "bound_by": _sentence(config, shares, merged.observations.filter(~pl.col("warmup"))),
    }


def rank_names(observed: pl.DataFrame) -> dict[int, str]:
    """A label for each rank that names the stages it carries."""
    carried: dict[int, list[str]] = {}
    for rank, module, stage in observed.select("rank", "module", "pp_stage").unique().sort("rank", "module").rows():
        carried.setdefault(rank, []).append(f"{module} stage {stage}")
    return {rank: f"rank {rank} ({', '.join(stages)})" for rank, stages in carried.items()}


def _sentence(config: Config, shares: Mapping[str, np.ndarray], observed: pl.DataFrame) -> str:
    waits = {
        part: float(share.max() if part in _OF_WORST_RANK else share.mean())
        for part, share in shares.items()
        if part != "computing"
    }
    largest = max(waits, key=waits.get)
    taken = f"{waits[largest]:.0%} of each step"
    if waits[largest] < _LEAST_SHARE:
        return (
            f"Computing bounds this run: ranks compute {shares['computing'].mean():.0%} of each step, and no wait "
            f"takes {_LEAST_SHARE:.0%} of it; faster or more devices, or `train.precision: bf16`, shorten it"
        )
    if largest == "peers":
        return _of_peers(shares, observed, taken)
    workers = "as in plan.yaml" if config.train.loader_workers is None else config.train.loader_workers
    worst = rank_names(observed).get(int(shares[largest].argmax()), "a rank")
    return {
        "data": f"The loaders bound this run: {worst} waited {taken} for data; raise `train.loader_workers` (now "
        f"{workers}) where there are cores for more, or give the job more cores",
        "schedule": f"The scheduler bounds this run: {worst} waited {taken} for its schedule; raise "
        f"`schedule.lookahead_steps` (now {config.schedule.lookahead_steps}), or lower `schedule.search_trials` (now "
        f"{config.schedule.search_trials})",
        "bubble": f"The pipeline bounds this run: its own schedule leaves ranks without work for {taken}; more "
        "microbatches, which a larger `train.global_batch_size` allows, or another placement or schedule in `plan`, "
        "shorten that",
        "sync": f"Gradient sync bounds this run: it takes {taken}; a larger `train.global_batch_size`, or fewer "
        "replicas of larger stages, shorten it",
        "optimiser": f"The optimiser bounds this run: it takes {taken}; a larger `train.global_batch_size`, or more "
        "replicas, which divide its work, shorten it",
        "other": f"No wait bounds this run, but {taken} goes into other work: saving, logging, Python; a larger "
        f"`train.checkpoint_every` (now {config.train.checkpoint_every}) or a larger `train.global_batch_size` "
        "shortens that",
    }[largest]


def _of_peers(shares: Mapping[str, np.ndarray], observed: pl.DataFrame, taken: str) -> str:
    """The sentence for waits for other ranks: which rank the others wait for, and whether that was predicted."""
    computing, names = shares["computing"], rank_names(observed)
    worst = int(computing.argmax())
    others = np.delete(computing, worst)
    more = computing[worst] / others.mean() if len(others) and others.mean() > 0 else 1.0
    ratios = dict(
        observed.filter(pl.col("predicted_s") > 0)
        .group_by("rank")
        .agg(pl.col("seconds").sum() / pl.col("predicted_s").sum())
        .rows()
    )
    if more < _LEAST_MORE:
        return (
            f"Ranks wait for each other in turns for {taken} beyond what their schedule predicts, and all compute as "
            "much: microbatches or transfers take other times than predicted, or cores are shared; measure again "
            "with `dflop profile-costs` and `dflop profile-links` while nothing else runs"
        )
    of_others = [ratio for rank, ratio in ratios.items() if rank != worst]
    if worst in ratios and of_others and ratios[worst] > _LEAST_MORE * float(np.median(of_others)):
        return (
            f"{_capital(names[worst])} bounds this run: it takes {ratios[worst]:.2f}x its predicted time, the others "
            f"{np.median(of_others):.2f}x, and these wait for {taken} beyond what their schedule predicts; check what "
            "else runs on its device, or measure again with `dflop profile-costs`"
        )
    return (
        f"{_capital(names.get(worst, f'rank {worst}'))} bounds this run: it computes {more - 1:.0%} more than the "
        f"others, which wait for {taken} beyond what their schedule predicts; `dflop plan` may find a more even plan, "
        "or `plan.fixed` can pin one"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
