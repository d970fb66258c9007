"""JSON lists and JSON lines, streamed: records of a file of any size, each found again by its bytes.

A JSON list is cut at the commas between its elements by a scanner that knows only strings and brackets;
what stands between two cuts is parsed on its own. So an element that is no JSON is one bad record, and a
file that ends too early keeps all records before the end.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dflop.data.manifests.formats import DIGEST_BYTES, Span
from dflop.data.records import RecordError
from dflop.errors import UserError

__all__ = ["JsonLinesReader", "JsonListReader", "open_json"]

_CHUNK_BYTES = 8 << 20
# Longer than any record: a quote or bracket that is never closed would otherwise take the whole file into memory.
_MAX_RECORD_BYTES = 256 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"


def open_json(path: Path) -> "JsonListReader | JsonLinesReader":
    """The reader that the file's first character asks for: a list, or objects line by line.

    Raises:
        UserError: when it begins with neither.
    """
    file = path.open("rb")
    head = file.read(_CHUNK_BYTES)
    start = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
    text = head[start:].lstrip(_SPACE)
    if text.startswith(b"["):
        return JsonListReader(path, file)
    if path.suffix == ".jsonl" or _holds_lines(text):
        return JsonLinesReader(path, file, start)
    file.close()
    found = f"begins with {text[:1].decode('utf-8', 'replace')!r}" if text else "is empty"
    raise UserError(
        f"the manifest {path} {found}; it must be a JSON list of records, `[{{…}}, …]`, or one record a line (.jsonl)"
    )


class _JsonReader:
    """What lists and lines share: records are bytes of UTF-8 text."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._file = file

    def read(self, start: int, end: int) -> Any | RecordError:
        if end - start > _MAX_RECORD_BYTES:
            return RecordError(
                "bad_record",
                f"{self.path.name}, byte {start:,}: {end - start:,} bytes up to the next record; "
                "is a quote or bracket not closed?",
            )
        self._file.seek(start)
        content = self._file.read(end - start)
        try:
            return json.loads(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            return RecordError("bad_record", f"{self.path.name}, byte {start + error.start:,}: not UTF-8")
        except json.JSONDecodeError as error:
            at = start + len(content.decode("utf-8")[: error.pos].encode())
            ends = " (the file ends here)" if at >= self.size else ""
            return RecordError("bad_record", f"{self.path.name}, byte {at:,}: not JSON, {error.msg}{ends}")
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
            return RecordError("bad_record", f"{self.path.name}, byte {start:,}: {error}")

    def close(self) -> None:
        self._file.close()


class JsonLinesReader(_JsonReader):
    """One record a line; blank lines are none."""

    def __init__(self, path: Path, file: BinaryIO, start: int = 0) -> None:
        super().__init__(path, file)
        self._start = start

    def scan(self) -> Iterator[Span]:
        position = self._start
        self._file.seek(position)
        for line in self._file:
            if content := line.strip(_SPACE):
                yield Span(position, position + len(line), _digest(content))
            position += len(line)


class JsonListReader(_JsonReader):
    """The elements of a top-level list."""

    def scan(self) -> Iterator[Span]:
        """Spans lie between the commas. The last is no record where the file ends before the list does, or after it."""
        from dflop.data.manifests.json_cuts import find_cuts  # numba: only scanning needs it

        self._file.seek(0)
        state = np.zeros(3, dtype=np.int64)  # depth, inside a string, after a backslash
        begin, chunk_start, pending, num_spans, is_over = -1, 0, bytearray(), 0, False
        while chunk := self._file.read(_CHUNK_BYTES):
            cuts = [] if is_over else find_cuts(np.frombuffer(chunk, dtype=np.uint8), state).tolist()
            used = 0
            for cut in cuts:
                if begin < 0:  # the opening bracket
                    begin, used = chunk_start + cut + 1, cut + 1
                    continue
                pending += chunk[used:cut]
                is_over = chunk[cut] == ord("]")
                content = pending.strip(_SPACE)
                if content or num_spans or not is_over:  # an empty list has no record, `[1, ]` has a bad one
                    yield Span(begin, chunk_start + cut, _digest(content))
                    num_spans += 1
                begin, used, pending = chunk_start + cut + 1, cut + 1, bytearray()
            if begin >= 0 and len(pending) <= _MAX_RECORD_BYTES:
                pending += chunk[used:]
            chunk_start += len(chunk)
        rest = pending.strip(_SPACE)
        if is_over and rest:  # with the closing bracket, so that it is no record whatever it holds
            yield Span(begin - 1, chunk_start, _digest(rest))
        if not is_over:
            yield Span(begin, chunk_start, _digest(rest))
            if rest and state[0] == 1 and not state[1]:  # a whole record, and yet the list goes on
                yield Span(chunk_start, chunk_start, _digest(b""))


def _digest(content: bytes | bytearray) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _holds_lines(text: bytes) -> bool:
    """Whether it is records line by line: several objects, or one that has what a record has."""
    first, _, others = text.partition(b"\n")
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict):
        return False
    return bool(others.strip(_SPACE)) or "conversations" in record or "messages" in record
