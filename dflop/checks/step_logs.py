"""What other trainers write of their steps, as one log: seconds, loads, and waits for data.

`log_files` opens files and `log_formats` reads them, as a row a step and rank; here rows become one log of all ranks.
`read_batches` reads which samples each step had.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflop.base import UserError
from dflop.checks.log_files import LogFile, open_log
from dflop.checks.log_formats import FORMATS, LOADS, SECONDS, first_names, is_number, load_columns

__all__ = ["Batches", "StepLog", "read_batches", "read_log"]


@dataclass(kw_only=True, slots=True)
class StepLog:
    """Steps in their order. Arrays are float64 `[num_steps]`; `rank_loads` are `[num_steps, num_ranks]`. Loads are NaN
    where the log does not say them."""

    source: str
    step: np.ndarray
    seconds: np.ndarray
    loads: dict[str, np.ndarray] = field(default_factory=dict)
    rank_loads: dict[str, np.ndarray] = field(default_factory=dict)
    # Waiting for data on the rank that waits most, and the time in which a device has work, in the mean of ranks.
    data_s: np.ndarray | None = None
    busy_s: np.ndarray | None = None
    # The part of it in which collectives run, which begin before other ranks are there.
    collective_s: np.ndarray | None = None
    # What of the log was not used, and how its files were taken.
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Samples of each step: `costs[step]` is `[num_samples, num_columns]`, and `cells[step]` are their places, numbered
    `microbatch * num_ranks + rank`."""

    columns: list[str]
    costs: dict[int, np.ndarray]
    cells: dict[int, np.ndarray]
    num_ranks: int


def read_log(paths: Sequence[Path]) -> StepLog:
    """The steps of a log, whose files are those of several ranks, or of a run and its resumes.

    Raises:
        UserError: a file is damaged, or of no known format, or of another than the first; or no step is usable.
    """
    files = [open_log(path) for path in paths]
    sources, rows = zip(*map(_read, files), strict=True)
    for file, source in zip(files, sources, strict=True):
        if source != sources[0]:
            raise UserError(f"{paths[0]} is {sources[0]}, {file.path} is {source}: name files of one kind")
    found = _by_step(sources[0], paths, rows)
    usable = np.isfinite(found.seconds) & (found.seconds > 0)
    if not usable.any():
        raise UserError(f"{', '.join(map(str, paths))}: no step has a time above 0")
    return _only(found, usable)


def _read(file: LogFile) -> tuple[str, pl.DataFrame]:
    for source, read in FORMATS.items():
        try:
            rows = read(file)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise UserError(f"{file.path}: a record is damaged ({error})") from None
        if rows is not None and not len(rows):
            raise UserError(f"{file.path}: no step has a time above 0")
        if rows is not None:
            return source, rows
    if "log_history" in file.records[0]:
        raise UserError(
            f"{file.path}: Hugging Face's trainer_state.json has no times of steps; have a callback write them "
            "(docs/how-to/ten-minutes.md has one), or record a trace with torch's profiler"
        )
    names = first_names(file.records)
    listed = ", ".join(map(str, names[:12])) + (", …" if len(names) > 12 else "")
    raise UserError(
        f"{file.path}: of no known format (it has {listed}); it must be a trace of torch's profiler with its marks of "
        "steps, a log of torchtitan or NeMo AutoModel, or a table with a column of each step's seconds: "
        f"{', '.join(SECONDS)}"
    )


def _by_step(source: str, paths: Sequence[Path], rows: Sequence[pl.DataFrame]) -> StepLog:
    """One log of all ranks: the seconds and the wait of the slowest, and the loads of all."""
    notes = []
    table = pl.concat([own.with_columns(file=pl.lit(number)) for number, own in enumerate(rows)], how="diagonal")
    if table["rank"].null_count():
        # Traces that do not say their ranks: pieces of one rank where no step is in two of them.
        apart = table.select("file", "step").unique().height == table["step"].n_unique()
        own = pl.lit("0") if apart else pl.format("of file {}", "file")
        table = table.with_columns(rank=pl.col("rank").fill_null(own))
        if not apart:
            notes.append("the traces do not say their ranks; each is taken as that of a rank")
    once = _last_copies(paths, table)
    if len(once) < len(table):
        notes.append(f"{len(table) - len(once)} rows of repeated steps are left out; the last copy counts")
    num_ranks = once["rank"].n_unique()
    whole = once.filter(pl.len().over("step") == num_ranks).sort("step", "rank")
    num_steps = len(whole) // num_ranks
    if num_steps < (all_steps := once["step"].n_unique()):
        if not num_steps:
            raise UserError(f"{', '.join(map(str, paths))}: no step has a row of each of {num_ranks} ranks")
        notes.append(f"{_steps(all_steps - num_steps)} without a row of each of {num_ranks} ranks left out")
    of = {name: whole[name].to_numpy().reshape(-1, num_ranks) for name in whole.columns if name not in ("rank", "file")}
    loads = {name.removeprefix("load "): load for name, load in of.items() if name.startswith("load ")}
    for name, load in loads.items():
        if missing := int(np.isnan(load).any(axis=1).sum()):
            notes.append(f"{_steps(missing)} without {name} left out of shapes")
    seconds = of["seconds"].max(axis=1)

    def in_mean(name: str) -> np.ndarray | None:
        """A time on the devices: the mean share of ranks, of the slowest rank's seconds."""
        if name not in of or np.isnan(of[name]).any():
            return None
        return (of[name] / of["seconds"]).mean(axis=1) * seconds

    return StepLog(
        source=source + (f", {num_ranks} ranks" if num_ranks > 1 else ""),
        step=of["step"][:, 0],
        seconds=seconds,
        data_s=of["data"].max(axis=1) if "data" in of and not np.isnan(of["data"]).any() else None,
        loads={name: load.sum(axis=1) for name, load in loads.items()},
        rank_loads=loads if num_ranks > 1 else {},
        busy_s=in_mean("busy"),
        collective_s=in_mean("collective"),
        notes=notes,
    )


def _last_copies(paths: Sequence[Path], table: pl.DataFrame) -> pl.DataFrame:
    """A row a step and rank: of a file, the last; of several, that of the file that begins later, which resumed.

    Raises:
        UserError: files that hold the same step of a rank begin alike: two runs.
    """
    places = ["step", "rank"]
    table = table.unique([*places, "file"], keep="last", maintain_order=True)
    table = table.with_columns(first=pl.col("step").min().over("file", "rank")).sort("first", maintain_order=True)
    alike = table.filter(pl.len().over(*places, "first") > 1)
    if len(alike):
        step, rank = alike.row(0, named=True)["step"], alike.row(0, named=True)["rank"]
        one, other = alike.filter(pl.col("step") == step, pl.col("rank") == rank)["file"][:2]
        raise UserError(
            f"{paths[one]} and {paths[other]} both begin with step {step:g} of rank {rank}: name the files of one "
            "run; where these are two ranks, each row needs its `rank`"
        )
    return table.unique(places, keep="last", maintain_order=True).drop("first")


def _steps(number: int) -> str:
    return f"{number} step" + ("s" if number != 1 else "")


def read_batches(path: Path) -> Batches:
    """Which samples each step had: rows with `step`, `rank` and `microbatch` (0 where left out), and loads.

    Steps with a sample whose loads are not known, or without a sample of each rank, are left out.

    Raises:
        UserError: the file is damaged, or a row has no step, or there is no column of loads.
    """
    rows = open_log(path).records
    columns = load_columns(rows)
    if not columns or not all(is_number(row.get("step")) for row in rows):
        raise UserError(
            f"{path}: each row must have `step` and one load or more, in columns whose names end in {', '.join(LOADS)}"
        )
    # Ranks and microbatches are numbered anew, whatever they were called.
    ranks, rank = np.unique([str(row.get("rank", 0)) for row in rows], return_inverse=True)
    costs, places = defaultdict(list), defaultdict(list)
    for number, row in enumerate(rows):
        loads = [max(0.0, float(row[name])) if is_number(row.get(name)) else np.nan for name in columns]
        costs[int(row["step"])].append(loads)
        places[int(row["step"])].append((str(row.get("microbatch", 0)), rank[number]))
    cells = {}
    for step, of_step in places.items():
        if np.isnan(costs[step]).any() or len({number for _, number in of_step}) < len(ranks):
            continue
        microbatch = np.unique([name for name, _ in of_step], return_inverse=True)[1]
        cells[step] = microbatch * len(ranks) + np.array([number for _, number in of_step])
    if not cells:
        raise UserError(f"{path}: no step has the loads of samples of each of {len(ranks)} ranks")
    return Batches(
        columns=columns,
        costs={step: np.array(costs[step]) for step in cells},
        cells=cells,
        num_ranks=len(ranks),
    )


def _only(log: StepLog, mask: np.ndarray) -> StepLog:
    """The steps of a log that a mask keeps."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: load[mask] for name, load in value.items()}
        return value[mask] if isinstance(value, np.ndarray) else value

    return StepLog(**{own.name: cut(getattr(log, own.name)) for own in fields(log)})
