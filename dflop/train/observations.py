"""Observations: how long every computation took, and what was predicted.

Each rank writes Parquet parts while it trains, one at every checkpoint. When training has ended, they are merged into
`observations.duckdb`, together with the corrections that the scheduler learned from them. When a run is resumed, the
observations of steps that it repeats are deleted.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import xxhash

from dflop.base import UserError, set_torn_aside, written_whole
from dflop.schedule import StepSchedule, read_learned
from dflop.step import Node, Op, Span
from dflop.store import CORRECTIONS_SCHEMA, STEP_SECONDS_SCHEMA, read_parquet, write_observations, write_parquet
from dflop.train.step_seconds import seconds_frame

__all__ = [
    "CORRECTIONS_FILE",
    "NUM_WARMUP_STEPS",
    "OBSERVATIONS_SCHEMA",
    "Observations",
    "kept_schedule",
    "merge_observations",
]

# The first steps of a process load data and warm caches and allocators. They are kept and drawn, but excluded from all
# averages.
NUM_WARMUP_STEPS = 2
# It is in the folder of the parts, so that it is removed with them.
CORRECTIONS_FILE = "corrections.json"
# The schedule of one step, from the middle of the run, as it was carried out (`StepSchedule.to_bytes`).
SCHEDULE_FILE = "schedule-of-a-step.bin"
# The name of the first rank's parts with the table `step_seconds`.
_SECONDS = "seconds"
# The values of the column `pass`.
_PASS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.SYNC_GRADIENTS: "sync",
}
OBSERVATIONS_SCHEMA = {
    "step": pl.Int64,
    "rank": pl.Int64,
    "module": pl.String,
    "pp_stage": pl.Int64,
    "dp_rank": pl.Int64,
    "microbatch": pl.Int64,
    "pass": pl.String,
    "start_s": pl.Float64,
    "seconds": pl.Float64,
    "predicted_s": pl.Float64,
    "warmup": pl.Boolean,
}


class Taken(NamedTuple):
    """What `Observations` had buffered: rows of computations, and on the first rank a frame of step seconds a step."""

    rows: list[dict[str, object]]
    seconds: list[pl.DataFrame]


class Merged(NamedTuple):
    """All ranks' observations, sorted by step, rank and start, and the table `step_seconds`."""

    observations: pl.DataFrame
    step_seconds: pl.DataFrame


class Observations:
    """One rank's observations, buffered until they are written; `nodes` are all nodes of the program."""

    def __init__(self, folder: Path, rank: int, nodes: Sequence[Node]) -> None:
        self._folder, self._rank, self._nodes = folder, rank, nodes
        self._rows: list[dict[str, object]] = []
        self._seconds: list[pl.DataFrame] = []
        self._num_steps = 0

    @property
    def corrections_path(self) -> Path:
        """The file in which the scheduler keeps its corrections."""
        return self._folder / CORRECTIONS_FILE

    def add(self, step: int, schedule: StepSchedule, spans: list[Span], zero_s: float) -> None:
        """Record one step; `zero_s` is the time at which its first instruction began on this rank."""
        predicted = {Op.FORWARD: schedule.forward_s, Op.BACKWARD: schedule.backward_s}
        for span in spans:
            known, node = span.op in predicted, self._nodes[span.node]
            self._rows.append(
                {
                    "step": step,
                    "rank": self._rank,
                    "module": node.module,
                    "pp_stage": node.pp_stage,
                    "dp_rank": node.dp_rank,
                    "microbatch": span.microbatch,
                    "pass": _PASS[span.op],
                    "start_s": span.start_s - zero_s,
                    "seconds": span.seconds,
                    "predicted_s": float(predicted[span.op][span.node, span.microbatch]) if known else None,
                    "warmup": self._num_steps < NUM_WARMUP_STEPS,
                }
            )
        self._num_steps += 1

    def add_seconds(self, step: int, parts: np.ndarray, step_s: float) -> None:
        """Record where the time of the step that was added last went: `parts` as from `StepSeconds.of_step`."""
        self._seconds.append(seconds_frame(step, parts, step_s, warmup=self._num_steps <= NUM_WARMUP_STEPS))

    def keep_schedule(self, schedule: StepSchedule) -> None:
        """Write the schedule of a step, so that a report can show it beside its measured times. A full disk is
        ignored."""
        with suppress(OSError), written_whole(self._folder / SCHEDULE_FILE) as beside:
            encoded = schedule.to_bytes()
            beside.write_bytes(xxhash.xxh3_128_digest(encoded) + encoded)

    def take(self) -> Taken:
        """Empty the buffer and return its content, for `write`."""
        taken, self._rows, self._seconds = Taken(self._rows, self._seconds), [], []
        return taken

    def write(self, taken: Taken, num_steps: int) -> None:
        """Write what was taken, as the parts that end at step `num_steps`.

        Raises:
            OSError: when a file cannot be written. What was taken is then put back into the buffer.
        """
        try:
            for name, schema, frames in (
                (f"rank-{self._rank:05d}", OBSERVATIONS_SCHEMA, [_frame(taken.rows)] if taken.rows else []),
                (_SECONDS, STEP_SECONDS_SCHEMA, taken.seconds),
            ):
                if frames:
                    path = self._folder / f"{name}.{num_steps:06d}.parquet"
                    write_parquet(pl.concat(frames).match_to_schema(schema), path)
        except OSError:
            self._rows[:0], self._seconds[:0] = taken
            raise

    def forget_from(self, num_steps: int) -> None:
        """Delete all ranks' observations of steps from `num_steps` on, because a resumed run records them again."""
        for left in self._folder.glob(".*.parquet"):
            left.unlink(missing_ok=True)  # of a process that was killed while it wrote (`written_whole`)
        for part in self._folder.glob("[!.]*.parquet"):
            name, end = part.stem.rsplit(".", 1)
            if int(end) <= num_steps:
                continue
            earlier = _read(part).filter(pl.col("step") < num_steps)
            if len(earlier):
                write_parquet(earlier, part.with_name(f"{name}.{num_steps:06d}.parquet"))
            part.unlink(missing_ok=True)


def kept_schedule(parts: Path) -> StepSchedule | None:
    """The schedule that `Observations.keep_schedule` wrote into the folder `parts`; None if there is none.

    A damaged file is moved aside with a warning.
    """
    path = parts / SCHEDULE_FILE
    if not path.is_file():
        return None
    digest, encoded = path.read_bytes()[:16], path.read_bytes()[16:]
    if xxhash.xxh3_128_digest(encoded) == digest:
        return StepSchedule.from_bytes(encoded)
    set_torn_aside(path, "it is not as it was written, so no measured step can be shown")
    return None


def merge_observations(parts: Path, path: Path, left_out: pl.DataFrame, meta: dict[str, str]) -> Merged:
    """Merge all ranks' parts in the folder `parts` into `observations.duckdb` (`path`), with the corrections, and the
    samples that were `left_out`."""
    frame, seconds = (
        pl.concat([pl.DataFrame(schema=schema), *map(_read, sorted(parts.glob(f"{name}.parquet")))])
        for name, schema in (("rank-*", OBSERVATIONS_SCHEMA), (f"{_SECONDS}.*", STEP_SECONDS_SCHEMA))
    )
    frame, seconds = frame.sort("step", "rank", "start_s"), seconds.sort("step", "rank")
    corrections = pl.DataFrame(read_learned(parts / CORRECTIONS_FILE).table(), schema=CORRECTIONS_SCHEMA)
    write_observations(path, frame, corrections, left_out, seconds, meta)
    return Merged(frame, seconds)


def _frame(rows: list[dict[str, object]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=OBSERVATIONS_SCHEMA)


def _read(part: Path) -> pl.DataFrame:
    """A part's rows. A part that cannot be read is moved aside with a warning, and gives no rows."""
    schema = STEP_SECONDS_SCHEMA if part.name.startswith(_SECONDS) else OBSERVATIONS_SCHEMA
    try:
        return read_parquet(part, made_by="train").match_to_schema(schema)
    except (pl.exceptions.PolarsError, UserError, OSError) as error:
        set_torn_aside(part, f"it cannot be read ({str(error).splitlines()[0]}), so its rows are left out")
        return pl.DataFrame(schema=schema)
