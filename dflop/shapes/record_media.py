"""The media that a record names: paths under a source's media root, or bytes that the manifest itself holds."""

import binascii
import io
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote

from dflop.base import printable

__all__ = [
    "MEDIA_KINDS",
    "Embedded",
    "EmbeddedBytes",
    "ImageSize",
    "Medium",
    "RecordError",
    "from_base64",
    "is_text",
    "medium_file",
    "resolve_medium",
]

MEDIA_KINDS = ("image", "video", "audio")

_MAX_DETAIL = 1000
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_URL = re.compile("data:[^,]{0,100};base64,", re.IGNORECASE)
_FILE_URL = re.compile("file://(localhost)?(?=/)", re.IGNORECASE)


class RecordError(Exception):
    """Why one record cannot be used: `reason` is one of `store.REJECT_REASONS`, `detail` a sentence for the user."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = printable(detail[:_MAX_DETAIL])
        super().__init__(self.detail)


class ImageSize(NamedTuple):
    """Pixels."""

    width: int
    height: int


@dataclass(frozen=True)
class Embedded(ABC):
    """A medium that lies inside its manifest; `name` is for messages."""

    name: str

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def open(self) -> BinaryIO:
        """The medium's bytes as a seekable file."""


@dataclass(frozen=True)
class EmbeddedBytes(Embedded):
    """A medium whose bytes are in memory."""

    content: bytes = field(repr=False)

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content)


@dataclass(frozen=True, slots=True)
class Medium:
    """One of `MEDIA_KINDS`. `file` is a path under the media root or the embedded medium; `size` is the one that the
    record gives, if the source's sizes are trusted."""

    kind: str
    file: str | Embedded
    size: ImageSize | None = None


def resolve_medium(media_root: Path, medium: Medium) -> Path | Embedded:
    """The path of a medium, or the embedded medium. A path must lie inside `media_root` after all links are followed.

    Raises:
        RecordError: path_escape or missing_media.
    """
    if isinstance(medium.file, Embedded):
        return medium.file
    if _URL.match(medium.file):
        raise RecordError(
            "missing_media",
            f"{medium.file} is a URL, and nothing is fetched: download it and give a path under {media_root}",
        )
    root = _resolved(media_root.absolute())
    try:
        path = (root / medium.file).resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links that lead in a circle
        raise RecordError("missing_media", f"{medium.file!r}: {getattr(error, 'strerror', None) or error}") from None
    if not path.is_relative_to(root):
        if Path(os.path.normpath(root / medium.file)).is_relative_to(root):
            raise RecordError(
                "path_escape",
                f"{medium.file} is a link to {path}, outside the media root {media_root}; make "
                "`data.sources[].media_root` a folder that holds both, or copy the file",
            )
        raise RecordError(
            "path_escape", f"{medium.file} lies outside the media root {media_root} (`data.sources[].media_root`)"
        )
    if not is_file:
        raise RecordError("missing_media", f"{medium.file} is not a file under {media_root}")
    return path


@lru_cache(maxsize=256)
def _resolved(folder: Path) -> Path:
    return folder.resolve()


def medium_file(entry: Any, name: str, where: str) -> str | Embedded:
    """A path, or a medium that the record holds: bytes, or Hugging Face's `{bytes, path}`.

    Raises:
        RecordError: bad_record.
    """
    if isinstance(entry, dict) and ("bytes" in entry or "path" in entry):
        path = entry.get("path")
        name = path if is_text(path) and path else name
        entry = entry["bytes"] if entry.get("bytes") is not None else path
    if isinstance(entry, str) and (header := _DATA_URL.match(entry)):
        entry = from_base64(entry[header.end() :], where)
    if isinstance(entry, bytes):
        return EmbeddedBytes(name, entry)
    if isinstance(entry, Embedded) or (is_text(entry) and entry):
        is_url = isinstance(entry, str) and (header := _FILE_URL.match(entry))
        return unquote(entry[header.end() :]) if is_url else entry
    shown = repr(entry)
    raise RecordError(
        "bad_record", f"{where} holds {shown[:80]}{'…' * (len(shown) > 80)}; it must be a path or a list of paths"
    )


def from_base64(text: Any, where: str) -> bytes:
    """The bytes of a medium that is written in base64.

    Raises:
        RecordError: bad_record.
    """
    try:
        return binascii.a2b_base64("".join(text.split()), strict_mode=True)
    except (AttributeError, TypeError, ValueError) as error:
        raise RecordError("bad_record", f"{where} is not base64: {error}") from None


def is_text(value: Any) -> bool:
    """Whether a value is a str without unpaired surrogates, which no tokenizer, table or file system accepts."""
    return isinstance(value, str) and (value.isascii() or not _HALF_PAIR.search(value))
