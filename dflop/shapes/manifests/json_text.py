"""JSON lists and JSON lines, streamed: records of a file of any size, each found again by its byte offsets.

A scanner that knows only strings and brackets cuts a JSON list at the commas between its elements; each element is then
parsed on its own. So an element that is not JSON is one bad record, and of a file that ends too early all records
before the end are read. A stray quote or bracket misleads the scanner. An element that seems to contain other records
is therefore cut again, where the next whole record inside it begins.
"""

import json
import re
from collections.abc import Generator, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dflop.shapes.manifests.entries import CUT_OFF, DIGEST_BYTES, MAX_RECORD_BYTES, RecordSpan, UnreadableFile
from dflop.shapes.record_media import RecordError

__all__ = ["JsonLinesReader", "JsonListReader", "open_json"]

_CHUNK_BYTES = 8 << 20
# An element longer than this is searched for other records inside it.
_LONG_RECORD_BYTES = 256 << 10
# The first whole record after a damaged one must be shorter than this to be found; a longer one is lost, too.
_MAX_BYTES_AFTER_DAMAGE = 1 << 20
# What may be spent in all on looking for records after damage: a look, a long look, and reading on from a record.
_MAX_SPENT, _SHORT_LOOK, _LONG_LOOK, _READING_ON = 1_000_000, 1, 100, 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_BRACES = tuple(b"{}")
# Possessive, so that a long gap without a next object is read once: it would take its length squared else.
_BETWEEN_OBJECTS = re.compile(rb"}[ \t\r\n]*+(,?)[ \t\r\n]*+(?={)")
_TURN_KEYS = ("conversations", "messages")
_CONVERSATIONS, _MESSAGES = (f'"{key}"'.encode() for key in _TURN_KEYS)


def open_json(path: Path) -> "JsonListReader | JsonLinesReader":
    """The reader for a file, chosen by how the file begins: with a list, or with objects line by line.

    Raises:
        UnreadableFile: when it begins with neither.
        OSError: when it cannot be opened.
    """
    file = path.open("rb")
    head = file.read(_CHUNK_BYTES)
    start = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
    text = head[start:].lstrip(_SPACE)
    if text.startswith(b"["):
        return JsonListReader(path, file, head.index(b"[") + 1)
    if path.suffix == ".jsonl" or _holds_lines(text):
        return JsonLinesReader(path, file, start)
    file.close()
    found = f"begins with {text[:1].decode('utf-8', 'replace')!r}" if text else "is empty"
    raise UnreadableFile(
        f"the manifest {path} {found}; it must be a JSON list of records, `[{{…}}, …]`, or one record a line (.jsonl)"
    )


class _JsonReader:
    """What the readers of lists and lines share: a record is a range of bytes of UTF-8 text."""

    _last_sign: str  # the character with which a complete file ends

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._file = file

    def read(self, start: int, end: int) -> Any | RecordError:
        if end - start > MAX_RECORD_BYTES:
            return RecordError(
                "bad_record",
                f"{self.path.name}, byte {start:,}: {end - start:,} bytes up to the next record; "
                "is a quote or bracket not closed?",
            )
        self._file.seek(start)
        content = self._file.read(end - start)
        try:
            text = content.decode("utf-8")
            return json.loads(text)
        except UnicodeDecodeError as error:
            is_cut = end >= self.size and error.reason == "unexpected end of data"
            why = f"{CUT_OFF} (inside a character)" if is_cut else "not UTF-8"
            return RecordError("bad_record", f"{self.path.name}, byte {start + error.start:,}: {why}")
        except json.JSONDecodeError as error:
            at = start + len(text[: error.pos].encode())
            why = f"{CUT_OFF} ({error.msg})" if self._is_cut_off(end, text, error.pos) else f"not JSON, {error.msg}"
            return RecordError("bad_record", f"{self.path.name}, byte {at:,}: {why}")
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
            return RecordError("bad_record", f"{self.path.name}, byte {start:,}: {error}")

    def close(self) -> None:
        self._file.close()

    def _is_cut_off(self, end: int, content: str, at: int) -> bool:
        """Whether content that is broken at character `at` is so because the file ends there."""
        is_open = at >= len(content) or not content.rstrip().endswith(self._last_sign)
        return end >= self.size and not content.startswith("]") and is_open


class JsonLinesReader(_JsonReader):
    """One record a line; blank lines are skipped."""

    _last_sign = "}"

    def __init__(self, path: Path, file: BinaryIO, start: int = 0) -> None:
        super().__init__(path, file)
        self._start = start

    def scan(self) -> Iterator[RecordSpan]:
        position = self._start
        self._file.seek(position)
        while line := self._file.readline(MAX_RECORD_BYTES + 1):
            num_bytes = len(line)
            rest = line
            while len(rest) > MAX_RECORD_BYTES and not rest.endswith(b"\n"):  # too long to be a record
                rest = self._file.readline(MAX_RECORD_BYTES + 1)
                num_bytes += len(rest)
            if content := line.strip(_SPACE):
                yield RecordSpan(position, position + num_bytes, _digest(content))
            position += num_bytes


class JsonListReader(_JsonReader):
    """The elements of a top-level list, which begins before byte `start`."""

    _last_sign = "]"

    def __init__(self, path: Path, file: BinaryIO, start: int) -> None:
        super().__init__(path, file)
        self._start = start
        self._spent = 0

    def scan(self) -> Iterator[RecordSpan]:
        """Spans between the commas. If the file ends inside its list or goes on after it, the last span is a bad
        record."""
        begin: int | None = self._start
        while begin is not None:
            begin = yield from self._scan_from(begin)

    def _scan_from(self, begin: int) -> Generator[RecordSpan, None, int | None]:
        """The spans from byte `begin` on, up to a damaged one. Returns where the next whole record begins, or None at
        the end."""
        searched = begin
        for start, end, content in self._elements(begin):
            if content is not None and _is_sound(content):
                yield RecordSpan(start, end, _digest(content))
                continue
            if found := self._next_record(max(start, searched), end):
                end, resumed = found
                yield RecordSpan(start, end, _digest(self._read_bytes(start, min(end, start + MAX_RECORD_BYTES))))
                return resumed
            searched = end
            if content is not None:
                yield RecordSpan(start, end, _digest(content))
        return None

    def _elements(self, begin: int) -> Iterator[tuple[int, int, bytes | None]]:
        """Start, end and content of the elements from byte `begin` on. While a long element is read, it is given with
        None as its content: once for each further chunk."""
        from dflop.shapes.manifests.json_cuts import find_cuts  # numba: only scanning needs it

        state = np.array([1, 0, 0])  # depth, inside a string, after a backslash
        position, pending, is_over = begin, bytearray(), False
        chunk_bytes = min(_LONG_RECORD_BYTES, _CHUNK_BYTES)  # grows; small first, as each damaged place starts again
        while chunk := self._read_bytes(position, position + chunk_bytes):
            chunk_bytes = min(2 * chunk_bytes, _CHUNK_BYTES)
            cuts = [] if is_over else find_cuts(np.frombuffer(chunk, dtype=np.uint8), state).tolist()
            used = 0
            for cut in cuts:
                pending += chunk[used:cut]
                is_over = chunk[cut] == ord("]")
                content = pending.strip(_SPACE)
                if content or not is_over or begin > self._start:  # an empty list has no record, `[1, ]` has a bad one
                    yield begin, position + cut, content
                begin, used, pending = position + cut + 1, cut + 1, bytearray()
            if len(pending) <= MAX_RECORD_BYTES:
                pending += chunk[used:]
            position += len(chunk)
            if len(pending) > _LONG_RECORD_BYTES or (position == self.size and not is_over):
                yield begin, position, None
        rest = pending.strip(_SPACE)
        if is_over and rest:  # with the closing bracket, so that it is never taken for a record
            yield begin - 1, position, b"]" + rest
        if not is_over:
            yield begin, position, rest
            if rest and state[0] == 1 and not state[1]:  # a whole record, and yet the list goes on
                yield position, position, b""

    def _next_record(self, start: int, end: int) -> tuple[int, int] | None:
        """Where a damaged stretch ends, and where the first whole record that begins inside it begins.

        Only records have turns (`conversations`, `messages`): that tells them from the objects inside them.
        """
        for first in range(start, end, _CHUNK_BYTES):
            # A little more than the block, for a match across two of them.
            block = self._read_bytes(first, min(end, first + _CHUNK_BYTES) + 4096)
            for match in _BETWEEN_OBJECTS.finditer(block):
                if self._spent > _MAX_SPENT:
                    return None
                if first + match.start() < end and self._begins_record(first + match.end()):
                    self._spent += _READING_ON
                    return first + match.start(1), first + match.end()
        return None

    def _begins_record(self, at: int) -> bool:
        for num_bytes, price in ((4096, _SHORT_LOOK), (_MAX_BYTES_AFTER_DAMAGE, _LONG_LOOK)):  # most are short turns
            self._spent += price
            text = self._read_bytes(at, at + num_bytes).decode("utf-8", "replace")
            try:
                value, length = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError):
                continue
            return any(key in value for key in _TURN_KEYS) and text[length:].lstrip()[:1] in ("", ",", "]")
        return False

    def _read_bytes(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(end - start)


def _is_sound(content: bytes | bytearray) -> bool:
    """Whether an element seems to be cut correctly: it is an object with the turns of one record, or valid JSON."""
    is_object = not content or (content[0], content[-1]) == _BRACES
    if is_object and content.count(_CONVERSATIONS) + content.count(_MESSAGES) < 2:
        return True
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _digest(content: bytes | bytearray) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _holds_lines(text: bytes) -> bool:
    """Whether there is one record a line: the first line is an object, and more lines follow it or it has turns."""
    first, _, others = text.partition(b"\n")
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict):
        return False
    return bool(others.strip(_SPACE)) or any(key in record for key in _TURN_KEYS)
