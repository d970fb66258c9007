"""Files of logs as records: the rows of a table, the lines of a log, or the events of a trace.

Nothing here knows a trainer: `log_formats` says what records mean.
"""

import gzip
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from dflop.base import UserError

__all__ = ["LogFile", "Records", "open_log"]

Records = Sequence[Mapping[str, Any]]

# No log is read beyond so many bytes when unpacked.
_MOST_BYTES = 4 << 30
# So many lines of a log of JSON lines may be no JSON at its top, e.g. a banner.
_MOST_HEADERS = 5
# Cells of tables without a value.
_NO_VALUE = ["", "-", "n/a", "N/A", "NA", "nan", "NaN", "null", "None"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFile:
    path: Path
    records: Records
    # What a trace says of its process; None in other logs.
    trace_rank: str | None = None


def open_log(path: Path) -> LogFile:
    """The records of a file, plain or gzip.

    Raises:
        UserError: the file cannot be read, or holds no records.
    """
    try:
        content = path.read_bytes() if path.is_file() else None
        if content is not None and content[:2] == b"\x1f\x8b":
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_MOST_BYTES + 1)
    except (OSError, EOFError, gzip.zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if content is None:
        raise UserError(f"{path} is no file" if path.exists() else f"{path} does not exist")
    if len(content) > _MOST_BYTES:
        raise UserError(f"{path}: unpacks into more than {_MOST_BYTES >> 30} GiB; record fewer steps")
    if b"\0" in content[:4096]:
        raise UserError(f"{path}: is no text; name a trace, a log or a table as text (gzip is read)")
    text = content.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if text[:1] in ("{", "["):
        whole = _whole(text)
        found = _lines(path, text) if whole is None else _records_of(whole)
    else:
        whole, json_text = None, _below_headers(text)
        found = _table(path, text) if json_text is None else _lines(path, json_text)
    if not any(found) or not all(isinstance(record, Mapping) for record in found):
        raise UserError(f"{path}: holds no records")
    process = whole.get("distributedInfo") if isinstance(whole, dict) else None
    rank = process.get("rank") if isinstance(process, dict) else None
    return LogFile(path=path, records=found, trace_rank=None if rank is None else str(rank))


def _whole(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _records_of(whole: Any) -> Records:
    if isinstance(whole, dict):
        return whole["traceEvents"] if isinstance(whole.get("traceEvents"), list) else [whole]
    return whole if isinstance(whole, list) else []


def _below_headers(text: str) -> str | None:
    """The JSON lines below a few lines that are none; None where there are no such lines."""
    lines = text.splitlines(keepends=True)[: _MOST_HEADERS + 1]
    for number, line in enumerate(lines):
        if line.startswith("{") and _whole(line) is not None:
            return text[sum(map(len, lines[:number])) :]
    return None


def _table(path: Path, text: str) -> Records:
    top = text.partition("\n")[0]
    separator = max(",;\t", key=top.count)
    # A comma is a decimal point in tables that are separated by semicolons, e.g. `0,53;4096`.
    with_commas = separator == ";" and re.search(r"\d,\d", text) is not None
    try:
        return pl.read_csv(
            io.StringIO(text),
            infer_schema_length=None,
            separator=separator,
            decimal_comma=with_commas,
            null_values=_NO_VALUE,
        ).to_dicts()
    except (pl.exceptions.PolarsError, ValueError) as error:
        raise UserError(f"{path}: is no table ({str(error).splitlines()[0] if str(error) else 'damaged'})") from None


def _lines(path: Path, text: str) -> Records:
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
