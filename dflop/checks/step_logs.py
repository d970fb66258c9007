"""What other trainers write of their steps, as one table: seconds, loads, and waits for data.

One function a format, in `_FORMATS`; each takes the file's records and gives None where they are another's. Read are
the traces of torch's profiler (Kineto, and other Chrome traces with its marks), torchtitan's structured logs, NeMo
AutoModel's `training.jsonl`, and tables of steps (CSV or JSON lines). `read_batches` reads which samples each step had.
"""

import gzip
import io
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflop.base import UserError

__all__ = ["Batches", "StepLog", "read_batches", "read_log"]

Records = Sequence[Mapping[str, Any]]

# No log is read beyond so many bytes when unpacked.
_MOST_BYTES = 4 << 30
_SECONDS = ("step_s", "seconds", "step_time_s", "step_time", "time_metrics/end_to_end(s)")
_DATA = ("data_s", "data_time_s", "data_time", "time_metrics/data_loading(s)")
_LOADS = ("tokens", "items", "pixels", "patches", "images", "frames", "windows")
_PLACES = ("step", "rank", "microbatch")


@dataclass(kw_only=True, slots=True)
class StepLog:
    """Steps in the order of the log. Arrays are float64 `[num_steps]`; `rank_loads` are `[num_steps, num_ranks]`."""

    source: str
    step: np.ndarray
    seconds: np.ndarray
    loads: dict[str, np.ndarray] = field(default_factory=dict)
    rank_loads: dict[str, np.ndarray] = field(default_factory=dict)
    # Waiting for data on the rank that waits most, and the time in which the device has work.
    data_s: np.ndarray | None = None
    busy_s: np.ndarray | None = None
    # The part of it in which collectives run, which begin before other ranks are there.
    collective_s: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Samples of each step: `costs[step]` is `[num_samples, num_columns]`, and `cells[step]` are their places, numbered
    `microbatch * num_ranks + rank`."""

    columns: list[str]
    costs: dict[int, np.ndarray]
    cells: dict[int, np.ndarray]
    num_ranks: int


def read_log(paths: Sequence[Path]) -> StepLog:
    """The steps of a log; several files are those of several ranks.

    Raises:
        UserError: a file is damaged, or of no known format, or holds no step.
    """
    records = [record for path in paths for record in _records(path)]
    names = ", ".join(map(str, paths))
    for read in _FORMATS:
        try:
            found = read(records)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise UserError(f"{names}: a record is damaged ({error})") from None
        if found:
            usable = np.isfinite(found.seconds) & (found.seconds > 0)
            if not usable.any():
                raise UserError(f"{names}: no step has a time above 0")
            return _only(found, usable)
    raise UserError(
        f"{names}: of no known format; it must be a trace of torch's profiler, a log of torchtitan or NeMo AutoModel, "
        f"or a table with a column {_SECONDS[0]!r}, the seconds of each step"
    )


def read_batches(path: Path) -> Batches:
    """Which samples each step had: rows with `step`, `rank` and `microbatch` (0 where left out), and loads.

    Raises:
        UserError: the file is damaged, or a row has no step, or there is no column of loads.
    """
    rows = _records(path)
    columns = [name for name in _load_columns(rows) if all(_is_number(row.get(name)) for row in rows)]
    if not columns or not all(_is_number(row.get("step")) for row in rows):
        raise UserError(
            f"{path}: each row must have `step` and one load or more, in columns whose names end in {', '.join(_LOADS)}"
        )
    # Ranks and microbatches are numbered anew, whatever they were called.
    ranks, rank = np.unique([str(row.get("rank", 0)) for row in rows], return_inverse=True)
    costs, places = defaultdict(list), defaultdict(list)
    for number, row in enumerate(rows):
        costs[int(row["step"])].append([max(0.0, float(row[name])) for name in columns])
        places[int(row["step"])].append((str(row.get("microbatch", 0)), rank[number]))
    cells = {}
    for step, of_step in places.items():
        microbatch = np.unique([name for name, _ in of_step], return_inverse=True)[1]
        cells[step] = microbatch * len(ranks) + np.array([number for _, number in of_step])
    return Batches(
        columns=columns,
        costs={step: np.array(of_step) for step, of_step in costs.items()},
        cells=cells,
        num_ranks=len(ranks),
    )


def _records(path: Path) -> Records:
    """The rows of a table, the lines of a log, or the events of a trace."""
    try:
        content = path.read_bytes() if path.is_file() else None
        if content is not None and content[:2] == b"\x1f\x8b":
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_MOST_BYTES + 1)
    except (OSError, EOFError, gzip.zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if content is None:
        raise UserError(f"{path} does not exist")
    if len(content) > _MOST_BYTES:
        raise UserError(f"{path}: unpacks into more than {_MOST_BYTES >> 30} GiB; record fewer steps")
    text = content.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    found = _of_csv(path, text) if text[:1] not in ("{", "[") else _of_json(path, text)
    if not found or not all(isinstance(record, Mapping) for record in found):
        raise UserError(f"{path}: holds no records")
    return found


def _of_csv(path: Path, text: str) -> Records:
    try:
        return pl.read_csv(io.StringIO(text), infer_schema_length=None).to_dicts()
    except (pl.exceptions.PolarsError, ValueError) as error:
        raise UserError(f"{path}: is no table ({str(error).splitlines()[0] if str(error) else 'damaged'})") from None


def _of_json(path: Path, text: str) -> Records:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict):
        return whole["traceEvents"] if isinstance(whole.get("traceEvents"), list) else [whole]
    if isinstance(whole, list):
        return whole
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            if number == len(lines):  # a run that was ended leaves half a line
                break
            raise UserError(f"{path}: line {number} is no JSON") from None
    return found


def _of_trace(events: Records) -> StepLog | None:
    """Steps are the profiler's marks, `ProfilerStep#7`. A device has work while any of its kernels or copies runs."""
    events = [event for event in events if event.get("ph") == "X" and _is_number(event.get("ts"), event.get("dur"))]
    marks = sorted(
        {
            (event["ts"], event["ts"] + event["dur"], int(name.partition("#")[2]))
            for event in events
            if (name := str(event.get("name"))).startswith("ProfilerStep#")
            and name.partition("#")[2].isdecimal()
            and not str(event.get("cat", "")).startswith("gpu")
        }
    )
    if not marks:
        return None
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    loading = [event for event in events if str(event.get("name")).startswith("enumerate(DataLoader)#")]
    collective = [event for event in kernels if "nccl" in str(event.get("name")).lower()]
    busy, waiting = _Spans(kernels), _Spans(loading)
    # A host that waits for data while its device still computes loses nothing.
    idle_waits = [
        sum((end - start) - busy.within(start, end) for start, end in waiting.clipped(first, last))
        for first, last, _ in marks
    ]

    def per_step(spans: _Spans) -> np.ndarray:
        return np.array([spans.within(first, last) for first, last, _ in marks]) / 1e6

    return StepLog(
        source="a trace of torch's profiler",
        step=np.array([number for *_, number in marks], dtype=np.float64),
        seconds=np.array([last - first for first, last, _ in marks]) / 1e6,
        data_s=np.array(idle_waits) / 1e6 if loading else None,
        busy_s=per_step(busy) if kernels else None,
        collective_s=per_step(_Spans(collective)) if kernels else None,
    )


class _Spans:
    """The union of events' spans, in microseconds."""

    def __init__(self, events: Records) -> None:
        merged: list[list[float]] = []
        for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._spans = np.array(merged, dtype=np.float64).reshape(-1, 2)
        self._length = np.concatenate([[0.0], np.cumsum(self._spans[:, 1] - self._spans[:, 0])])

    def within(self, first: float, last: float) -> float:
        return self._up_to(last) - self._up_to(first)

    def clipped(self, first: float, last: float) -> list[tuple[float, float]]:
        return [(max(start, first), min(end, last)) for start, end in self._spans if start < last and end > first]

    def _up_to(self, time: float) -> float:
        number = int(np.searchsorted(self._spans[:, 0], time))
        beyond = max(0.0, self._spans[number - 1, 1] - time) if number else 0.0
        return float(self._length[number]) - beyond


def _of_torchtitan(records: Records) -> StepLog | None:
    """Each rank's file has spans whose ends say their milliseconds, and the target tokens of its batches."""
    if "log_type_name" not in records[0]:
        return None
    seconds, data_s, tokens = (defaultdict(lambda: defaultdict(float)) for _ in range(3))
    tables = {("step_end", None): seconds, ("fetching_batch_end", None): data_s}
    tables["metric_value", "local_valid_tokens"] = tokens
    for record in records:
        kind = record.get("log_type_name")
        table = tables.get((kind, record.get("event_name") if kind == "metric_value" else None))
        if table is not None and _is_number(record.get("step"), record.get("value")):
            table[int(record["step"])][record.get("rank", 0)] += record["value"]
    if not seconds:
        return None
    steps = sorted(seconds)
    ranks = sorted({rank for of_step in tokens.values() for rank in of_step}, key=str)
    known = np.array([[tokens[step].get(rank, np.nan) for rank in ranks] for step in steps])
    whole = bool(ranks) and bool(np.isfinite(known).all())
    return StepLog(
        source="torchtitan's log",
        step=np.array(steps, dtype=np.float64),
        seconds=np.array([max(seconds[step].values()) for step in steps]) / 1e3,
        data_s=np.array([max(data_s[step].values(), default=0.0) for step in steps]) / 1e3 if data_s else None,
        loads={"target tokens": known.sum(axis=1)} if whole else {},
        rank_loads={"target tokens": known} if whole and len(ranks) > 1 else {},
    )


def _of_automodel(records: Records) -> StepLog | None:
    """Its tokens a second are those of the time since the step before, loading included."""
    rows = [row for row in records if _is_number(row.get("num_tokens_per_step"), row.get("tps")) and row["tps"] > 0]
    if not rows:
        return None
    tokens, tps = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("num_tokens_per_step", "tps"))
    targets = [row.get("num_label_tokens") for row in rows]
    loads = {"tokens": tokens}
    if _is_number(*targets):
        loads["target tokens"] = np.array(targets, dtype=np.float64)
    steps = np.array([row.get("step", number) for number, row in enumerate(rows)], dtype=np.float64)
    return StepLog(source="NeMo AutoModel's log", step=steps, seconds=tokens / tps, loads=loads)


def _of_table(records: Records) -> StepLog | None:
    """A row a step or, with a column `rank`, a row a step and rank: the slowest rank's time, and all ranks' loads."""
    seconds_name = next((name for name in _SECONDS if name in records[0]), None)
    if seconds_name is None:
        return None
    data_name = next((name for name in _DATA if name in records[0]), None)
    rows = [row for row in records if _is_number(row.get(seconds_name))]
    columns = [name for name in _load_columns(rows) if all(_is_number(row.get(name)) for row in rows)]
    frame = pl.DataFrame(
        {
            "step": [float(row.get("step", number)) for number, row in enumerate(rows)],
            "rank": [float(row.get("rank") or 0) for row in rows],
            "seconds": [float(row[seconds_name]) for row in rows],
            "data": [float(row[data_name]) if data_name and _is_number(row.get(data_name)) else 0.0 for row in rows],
            **{f"load {name}": [float(row[name]) for row in rows] for name in columns},
        }
    )
    order = frame.group_by("step", maintain_order=True)
    steps = order.agg(pl.col("seconds", "data").max(), pl.col("^load .*$").sum())
    ranks = order.agg(pl.col("^load .*$").sort_by("rank"))
    num_ranks = frame["rank"].n_unique()
    loads = {name: steps[f"load {name}"].to_numpy() for name in columns}
    whole = num_ranks > 1 and len(frame) == num_ranks * len(steps)
    return StepLog(
        source="a table of steps",
        step=steps["step"].to_numpy(),
        seconds=steps["seconds"].to_numpy(),
        data_s=steps["data"].to_numpy() if data_name else None,
        loads=loads,
        rank_loads={name: np.array(ranks[f"load {name}"].to_list()) for name in columns} if whole else {},
    )


_FORMATS = (_of_trace, _of_torchtitan, _of_automodel, _of_table)


def _load_columns(rows: Records) -> list[str]:
    first = rows[0] if rows else {}
    return [name for name in first if name not in _PLACES and str(name).endswith(_LOADS)]


def _is_number(*values: Any) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _only(log: StepLog, mask: np.ndarray) -> StepLog:
    """The steps of a log that a mask keeps."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: load[mask] for name, load in value.items()}
        return value[mask] if isinstance(value, np.ndarray) else value

    return StepLog(**{own.name: cut(getattr(log, own.name)) for own in fields(log)})
