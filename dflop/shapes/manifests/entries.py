"""The interface of manifest readers: the span of each record in its file, and the record of a span.

A reader scans its file once. For each record it gives a *span*: byte offsets (row numbers in formats that count rows)
and a digest of the record's content. Later it reads single records by their spans. A record that cannot be read is
returned as a `RecordError`, so that the others are still used. Files are streamed: a reader holds one record, one chunk
of JSON or a few rows in memory. The readers themselves are in `json_text`, `tables` and `tar`; `formats` chooses one.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dflop.base import UserError
from dflop.shapes.record_media import RecordError

__all__ = [
    "CUT_OFF",
    "DIGEST_BYTES",
    "MAX_RECORD_BYTES",
    "EntryReader",
    "RecordSpan",
    "UnreadableFile",
    "sizes_and_digest",
]

DIGEST_BYTES = 16

# The longest text of a record, media aside. As JSON such a text may become 24 times as many bytes of Python's objects.
MAX_RECORD_BYTES = 32 << 20

# The detail of a record that is broken because its file ends inside it.
CUT_OFF = "the file is cut off here"

# A picture's or clip's shape is read from its first bytes; hashing more of an embedded medium would only cost time.
_HASHED_MEDIA_BYTES = 1 << 16


class UnreadableFile(UserError):
    """A file that is not what its suffix says, or of which nothing can be read: it is empty, damaged or cut off."""


class RecordSpan(NamedTuple):
    """Where a record lies: bytes or rows `[start, end)`, and the digest of its content."""

    start: int
    end: int
    digest: bytes


class EntryReader(Protocol):
    """One manifest file. `size` is the end of its last span: bytes, or rows."""

    path: Path
    size: int

    def scan(self) -> Iterator[RecordSpan]:
        """Every record's span, in order.

        Raises:
            UserError: when the file is not a manifest.
        """

    def read(self, start: int, end: int) -> Any | RecordError:
        """The raw record of a span, or why it cannot be read."""

    def close(self) -> None: ...


def sizes_and_digest(record: Any) -> tuple[int, int, bytes]:
    """A record of Python values: the characters of its text, the bytes of its embedded media, and its digest, for which
    media count by their lengths and their first bytes."""
    media = []

    def in_short(value: Any) -> str:
        if not isinstance(value, bytes):
            return str(value)
        media.append(len(value))
        return f"{len(value)} bytes {blake2b(value[:_HASHED_MEDIA_BYTES], digest_size=DIGEST_BYTES).hexdigest()}"

    text = json.dumps(record, sort_keys=True, ensure_ascii=False, default=in_short)
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
    return len(text), sum(media), digest
