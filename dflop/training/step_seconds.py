"""Where the seconds of a step went on each rank, and what that says of a run.

A rank's step is computing, and waiting: for data, for the schedule, in gradient sync, in the optimiser, and for other
ranks. Of the latter as much is the `bubble` as the schedule predicts for the rank, longer or shorter as computing took
in all, and the rest is `peers`. The parts of a rank add up to the step. Wherever replicas sync, the first of them waits
for the last: what it takes longer than the fastest is a wait for peers as well.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from dflop.pipeline import Program
from dflop.store import STEP_SECONDS_SCHEMA

__all__ = ["PARTS", "StepSeconds", "seconds_frame", "split_line"]

PARTS = ("computing", "bubble", "data", "peers", "schedule", "sync", "optimiser", "other")


class StepSeconds:
    """The first rank's: from what all ranks know of a step to the parts of each."""

    def __init__(self, program: Program, world_size: int) -> None:
        self._worker = np.zeros(world_size, dtype=np.int64)
        for number, worker in enumerate(program.workers):
            self._worker[worker.first_rank : worker.first_rank + worker.num_ranks] = number
        carried = [
            tuple((program.nodes[node].module, program.nodes[node].pp_stage) for node in worker.nodes)
            for worker in program.workers
        ]
        names = sorted(set(carried))
        # Ranks of a class sync the same stages.
        self._class = np.array([names.index(carried[worker]) for worker in self._worker])

    def of_step(self, known: np.ndarray, step_s: float, idle_of_worker: np.ndarray) -> np.ndarray:
        """The parts of each rank, [num_ranks, len(PARTS)], from `known` [num_ranks, len(KNOWN_PARTS)].

        `idle_of_worker` is the share of the predicted step that each worker waits.
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
    """`known` with no rank's seconds above the step's.

    The step is the first rank's. A rank that left the last step's sums before it began its own step earlier, and has
    that much more to tell. Its computing is of this step in any case, so the rest is shortened, all parts alike.
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
    """What `metrics.jsonl` says of a step: the mean rank, and the rank that waits least for others."""
    own = int(parts[:, [PARTS.index("bubble"), PARTS.index("peers")]].sum(axis=1).argmin())
    return {"mean_rank": _rounded(parts.mean(axis=0)), "slowest_rank": {"rank": own, **_rounded(parts[own])}}


def _rounded(seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_s": round(float(value), 5) for name, value in zip(PARTS, seconds, strict=True)}
