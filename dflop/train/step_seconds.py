"""Where the time of a step went on each rank.

A rank's step consists of computing, waiting for data, waiting for the schedule, gradient sync, the optimiser, waiting
for other ranks, and other work. Waiting for other ranks is the `bubble`, as far as the schedule predicts it for the
rank (scaled by how much longer or shorter than predicted computing took on all ranks), and `peers` beyond that. A
rank's parts add up to the step. Replicas that are early at a gradient sync wait for the last one: what a rank's sync
takes longer than the fastest one of the same stages counts as `peers`, too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from dflop.step import Program
from dflop.store import STEP_SECONDS_SCHEMA

__all__ = ["PARTS", "StepSeconds", "seconds_frame", "split_line"]

PARTS = ("computing", "bubble", "data", "peers", "schedule", "sync", "optimiser", "other")


class StepSeconds:
    """On the first rank: computes the parts of each rank's step from what all ranks know of the step."""

    def __init__(self, program: Program, world_size: int) -> None:
        self._worker = np.zeros(world_size, dtype=np.int64)
        for number, worker in enumerate(program.workers):
            self._worker[worker.first_rank : worker.first_rank + worker.num_ranks] = number
        carried = [
            tuple((program.nodes[node].module, program.nodes[node].pp_stage) for node in worker.nodes)
            for worker in program.workers
        ]
        names = sorted(set(carried))
        # Ranks of the same class carry, and sync, the same stages.
        self._class = np.array([names.index(carried[worker]) for worker in self._worker])

    def of_step(self, known: np.ndarray, step_s: float, idle_of_worker: np.ndarray) -> np.ndarray:
        """The parts of each rank in seconds, [num_ranks, len(PARTS)], from `known` [num_ranks, len(KNOWN_PARTS)].

        `idle_of_worker` [num_workers] is the share of the predicted step in which each worker waits.
        """
        known = _within(known, step_s)
        computing, data, peers, schedule, sync, optimiser, other = known.T
        fastest = np.full(self._class.max() + 1, np.inf)
        np.minimum.at(fastest, self._class, sync)
        synced = np.minimum(sync, fastest[self._class])
        in_the_sums = np.maximum(0.0, step_s - known.sum(axis=1))
        waited = peers + (sync - synced) + in_the_sums
        idle = idle_of_worker[self._worker]
        scale_s = computing.sum() / max(1e-9, (1 - idle).sum())
        bubble = np.minimum(waited, idle * scale_s)
        return np.column_stack([computing, bubble, data, waited - bubble, schedule, synced, optimiser, other])


def _within(known: np.ndarray, step_s: float) -> np.ndarray:
    """`known`, reduced so that no rank's parts add up to more than the step.

    The step is measured on the first rank. A rank that left the all-reduce before it began its step earlier, so that
    its parts add up to more. Its computing belongs to this step in any case, so all other parts are scaled down.
    """
    above = np.maximum(0.0, known.sum(axis=1) - step_s)
    rest = known[:, 1:].sum(axis=1)
    kept = 1 - np.minimum(1.0, np.divide(above, rest, out=np.zeros_like(rest), where=rest > 0))
    return np.column_stack([known[:, 0], known[:, 1:] * kept[:, None]])


def seconds_frame(step: int, parts: np.ndarray, step_s: float, *, warmup: bool) -> pl.DataFrame:
    """A step's parts as rows of the table `step_seconds`."""
    columns = {f"{name}_s": parts[:, place] for place, name in enumerate(PARTS)}
    same = {"step": step, "step_s": step_s, "warmup": warmup}
    columns |= {"rank": np.arange(len(parts)), **{name: [value] * len(parts) for name, value in same.items()}}
    return pl.DataFrame(columns, schema=STEP_SECONDS_SCHEMA)


def split_line(parts: np.ndarray) -> dict[str, Any]:
    """The field `seconds` of `metrics.jsonl`: the parts of the mean rank, and of the rank that waits least for
    others."""
    slowest = int(parts[:, [PARTS.index("bubble"), PARTS.index("peers")]].sum(axis=1).argmin())
    return {"mean_rank": _rounded(parts.mean(axis=0)), "slowest_rank": {"rank": slowest, **_rounded(parts[slowest])}}


def _rounded(seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_s": round(float(value), 5) for name, value in zip(PARTS, seconds, strict=True)}
