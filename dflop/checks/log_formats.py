"""What the logs of other trainers mean: one function a format, in `FORMATS`.

A function takes a file and gives a row a step and rank, or None where the file is of another format. Columns are
`step`, `rank`, `seconds`, and where known `data` (waits for it), `busy` (the device has work), `collective` (a part of
`busy`), and loads, e.g. `load num_tokens`, null where a row has none.
"""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import polars as pl

from dflop.checks.log_files import LogFile, Records

__all__ = ["FORMATS", "LOADS", "SECONDS", "first_names", "is_number", "load_columns"]

SECONDS = ("step_s", "seconds", "step_time_s", "step_time", "time_metrics/end_to_end(s)")
LOADS = ("tokens", "items", "pixels", "patches", "images", "frames", "windows")
_DATA = ("data_s", "data_time_s", "data_time", "time_metrics/data_loading(s)")
_PLACES = ("step", "rank", "microbatch")


def _of_trace(file: LogFile) -> pl.DataFrame | None:
    """Steps are the profiler's marks, `ProfilerStep#7`. A device has work while any of its kernels or copies runs.

    The rank is null where the trace does not say it.
    """
    events = [
        event for event in file.records if event.get("ph") == "X" and is_number(event.get("ts"), event.get("dur"))
    ]
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

    columns = {
        "step": np.array([number for *_, number in marks], dtype=np.float64),
        "rank": pl.Series([file.trace_rank] * len(marks), dtype=pl.String),
        "seconds": np.array([last - first for first, last, _ in marks], dtype=np.float64) / 1e6,
    }
    if loading:
        columns["data"] = np.array(idle_waits, dtype=np.float64) / 1e6
    if kernels:
        columns |= {"busy": per_step(busy), "collective": per_step(_Spans(collective))}
    return pl.DataFrame(columns)


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


def _of_torchtitan(file: LogFile) -> pl.DataFrame | None:
    """A process has a file. Spans' ends say their milliseconds; a step's batches are fetched one by one."""
    if "log_type_name" not in first_names(file.records):
        return None
    seconds, data, tokens = {}, defaultdict(float), defaultdict(float)
    tables = {("fetching_batch_end", None): data, ("metric_value", "local_valid_tokens"): tokens}
    for record in file.records:
        kind, place = record.get("log_type_name"), (record.get("step"), str(record.get("rank", 0)))
        if not is_number(place[0]):
            continue
        if kind == "step_start" and place in seconds:  # the step is repeated
            for table in (seconds, data, tokens):
                table.pop(place, None)
        if not is_number(value := record.get("value")):
            continue
        if kind == "step_end":
            seconds[place] = value
        table = tables.get((kind, record.get("event_name") if kind == "metric_value" else None))
        if table is not None:
            table[place] += value
    if not seconds:
        return None
    columns = {
        "step": [float(step) for step, _ in seconds],
        "rank": [rank for _, rank in seconds],
        "seconds": [value / 1e3 for value in seconds.values()],
    }
    if data:
        columns["data"] = [data.get(place, 0.0) / 1e3 for place in seconds]
    if tokens:
        columns["load target tokens"] = [tokens.get(place) for place in seconds]
    return pl.DataFrame(columns)


def _of_automodel(file: LogFile) -> pl.DataFrame | None:
    """Its tokens a second are those of the time since the step before, loading included."""
    rows = [row for row in file.records if is_number(row.get("num_tokens_per_step"), row.get("tps")) and row["tps"] > 0]
    if not rows:
        return None
    columns = {
        "step": _steps(rows),
        "rank": ["0"] * len(rows),
        "seconds": [row["num_tokens_per_step"] / row["tps"] for row in rows],
        "load tokens": _numbers(rows, "num_tokens_per_step"),
    }
    targets = _numbers(rows, "num_label_tokens")
    return pl.DataFrame(columns | ({"load target tokens": targets} if any(targets) else {}))


def _of_table(file: LogFile) -> pl.DataFrame | None:
    """A row a step or, with a column `rank`, a row a step and rank."""
    first = first_names(file.records)
    seconds_name = next((name for name in SECONDS if name in first), None)
    if seconds_name is None:
        return None
    data_name = next((name for name in _DATA if name in first), None)
    rows = [row for row in file.records if is_number(row.get(seconds_name))]
    if not rows and (texts := [value for row in file.records if isinstance(value := row.get(seconds_name), str)]):
        # One cell of words makes texts of a table's whole column.
        words = next((text for text in texts if not text.replace(".", "").isdecimal()), texts[0])
        raise ValueError(f"{seconds_name}={words!r} is no number")
    columns = {
        "step": _steps(rows),
        "rank": [str(row.get("rank") or 0) for row in rows],
        "seconds": [float(row[seconds_name]) for row in rows],
    }
    if data_name:
        columns["data"] = [value or 0.0 for value in _numbers(rows, data_name)]
    loads = {f"load {name}": _numbers(rows, name) for name in load_columns(rows)}
    return pl.DataFrame(columns | loads)


FORMATS = {
    "a trace of torch's profiler": _of_trace,
    "torchtitan's log": _of_torchtitan,
    "NeMo AutoModel's log": _of_automodel,
    "a table of steps": _of_table,
}


def first_names(records: Records) -> list[str]:
    """The names in the first records, of which one may be a header, e.g. of the run's settings."""
    return list(dict.fromkeys(name for record in records[:5] for name in record))


def load_columns(rows: Records) -> list[str]:
    """The columns of loads in which any row has a number."""
    names = dict.fromkeys(name for row in rows for name in row)
    loads = [name for name in names if name not in _PLACES and str(name).endswith(LOADS)]
    return [name for name in loads if any(is_number(row.get(name)) for row in rows)]


def is_number(*values: Any) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _numbers(rows: Records, name: str) -> list[float | None]:
    return [float(row[name]) if is_number(row.get(name)) else None for row in rows]


def _steps(rows: Records) -> list[float]:
    """The rows' steps; their places in the file where they have none."""
    steps = [row.get("step", number) for number, row in enumerate(rows)]
    if not is_number(*steps):
        raise ValueError("a step is no number")
    return [float(step) for step in steps]
