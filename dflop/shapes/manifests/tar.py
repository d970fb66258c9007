"""WebDataset shards: tar files in which the members of a sample share their name up to the first dot.

A sample's `.json` member is its record. Its media are the members with the suffixes of pictures, clips and sounds: in
the order in which the record names them, or else in the archive's. A `.txt` member is the caption of a sample without
turns. Media are read in place, never unpacked.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from dflop.shapes.manifests.entries import CUT_OFF, DIGEST_BYTES, MAX_RECORD_BYTES, RecordSpan, UnreadableFile
from dflop.shapes.record_media import MEDIA_KINDS, Embedded, RecordError
from dflop.shapes.records import record_id

__all__ = ["TarMember", "TarReader"]

_SUFFIXES = {
    "image": (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"),
    "video": (".mp4", ".webm", ".mkv", ".mov", ".avi", ".m4v"),
    "audio": (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac"),
}
_TEXTS = (".json", ".txt")
# The most bytes of a header that holds a long name or attributes of the next member.
_MAX_HEADER_BYTES = 1 << 20
_DESCRIBING = (b"x", b"g", b"X", b"L", b"K")
# What reading a truncated or damaged archive raises.
_DAMAGE = (tarfile.TarError, OSError)
# What tarfile raises for headers with absurd numbers, and for a thousand headers of one member.
_ABSURD = (ValueError, OverflowError, RecursionError)


@dataclass(frozen=True)
class TarMember(Embedded):
    """A medium inside a tar file, read where it lies."""

    archive: Path
    start: int
    num_bytes: int

    def open(self) -> BinaryIO:
        return io.BufferedReader(_FilePart(self.archive, self.start, self.num_bytes))


class _FilePart(io.RawIOBase):
    """`num_bytes` of a file from `start`, as a file of their own."""

    def __init__(self, path: Path, start: int, num_bytes: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._start, self._num_bytes, self._at = start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer) -> int:
        wanted = max(0, min(len(buffer), self._num_bytes - self._at))
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[:wanted])
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Header(tarfile.TarInfo):
    """A member's header; one that describes the next member must be short, as tarfile reads it whole.

    One that describes all members after it is passed over. tarfile would give each its name and size, and none where a
    sample is read alone.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _DESCRIBING and self.size > _MAX_HEADER_BYTES:
            raise tarfile.InvalidHeaderError(f"a header of {self.size:,} bytes")
        if self.type != tarfile.XGLTYPE:
            return super()._proc_member(archive)
        num_blocks = -(-self.size // tarfile.BLOCKSIZE)
        archive.fileobj.seek(num_blocks * tarfile.BLOCKSIZE, io.SEEK_CUR)
        try:
            return self.fromtarfile(archive)
        except tarfile.HeaderError as error:
            raise tarfile.SubsequentHeaderError(str(error)) from None


class TarReader:
    """A tar file; a span is the bytes from a sample's first header to the next sample's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        try:
            self._archive = tarfile.TarFile(path, tarinfo=_Header)
        except (tarfile.TarError, *_ABSURD) as error:
            raise UnreadableFile(
                f"the manifest {path} is not a tar file that can be read ({error}); compressed archives must be "
                "unpacked to plain tar first"
            ) from None

    def scan(self) -> Iterator[RecordSpan]:
        """Samples in the archive's order. If the archive is cut off or damaged, the rest of it is one bad record."""
        key, begin, digest, position = None, 0, None, 0
        try:
            for position, member in self._members(0, self.size):
                name, suffix = _split(member.name)
                if name != key:
                    if key is not None:
                        yield RecordSpan(begin, position, digest.digest())
                    key, begin, digest = name, position, blake2b(digest_size=DIGEST_BYTES)
                digest.update(f"{member.name}\0{member.size}\0".encode("utf-8", "surrogateescape"))
                if suffix.lower().endswith(_TEXTS) and member.size <= MAX_RECORD_BYTES and not member.issparse():
                    digest.update(self._text(member))
                else:
                    digest.update(str(member.mtime).encode())
        except _DAMAGE:
            if key is None:
                begin, digest = position, blake2b(digest_size=DIGEST_BYTES)
            key = ""
        if key is not None:
            yield RecordSpan(begin, self.size, digest.digest())

    def read(self, start: int, end: int) -> Any | RecordError:
        try:
            members = [member for _, member in self._members(start, end)]
            if sparse := next(filter(tarfile.TarInfo.issparse, members), None):
                detail = f"{sparse.name} is sparse: it claims bytes that the archive does not hold; pack it without -S"
                return RecordError("bad_record", f"{self.path.name}, byte {start:,}: {detail}")
            return self._record(members)
        except _DAMAGE as error:
            return RecordError("bad_record", f"{self.path.name}, byte {start:,}: {CUT_OFF} ({error})")
        except UnicodeDecodeError as error:
            return RecordError("bad_record", f"{self.path.name}, byte {start:,}: a text that is not UTF-8 ({error})")
        except (ValueError, RecursionError) as error:
            return RecordError("bad_record", f"{self.path.name}, byte {start:,}: not JSON, {error}")

    def close(self) -> None:
        self._archive.close()

    def _members(self, start: int, end: int) -> Iterator[tuple[int, tarfile.TarInfo]]:
        """The files between two offsets, each with the offset of its (first) header.

        Raises:
            tarfile.TarError: when a header is damaged or the archive ends inside a member.
        """
        archive, position = self._archive, start
        while position < end:
            archive.fileobj.seek(position)
            try:
                member = archive.tarinfo.fromtarfile(archive)
            except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):
                return
            except _ABSURD as error:
                raise tarfile.ReadError(str(error)) from None
            if member.isfile():
                yield position, member
            if not position < archive.offset <= self.size:  # a damaged header may lead back, too
                raise tarfile.ReadError(f"{member.name} ends at byte {archive.offset:,} of {self.size:,}")
            position = archive.offset

    def _record(self, members: list[tarfile.TarInfo]) -> dict[str, Any]:
        texts = {_split(member.name)[1].lower(): member for member in members}
        by_kind = {
            kind: [
                TarMember(member.name, self.path, member.offset_data, member.size)
                for member in members
                if member.name.lower().endswith(_SUFFIXES[kind])
            ]
            for kind in MEDIA_KINDS
        }
        key = _split(members[0].name)[0]
        if (described := texts.get(".json")) is not None:
            raw = json.loads(self._text(described).decode("utf-8"))
            if not isinstance(raw, dict):
                return raw
        else:
            raw = {}
        if "conversations" not in raw and "messages" not in raw and (caption := texts.get(".txt")) is not None:
            marks = "".join(f"<{kind}>\n" for kind in MEDIA_KINDS for _ in by_kind[kind])
            answer = self._text(caption).decode("utf-8")
            raw["conversations"] = [{"from": "human", "value": marks}, {"from": "gpt", "value": answer}]
        if record_id(raw) is None:
            raw["id"] = key
        for kind, media in by_kind.items():
            if media:
                named = raw.pop(f"{kind}s", None)
                raw[kind] = _in_named_order(media, raw.get(kind) or named)
        return raw

    def _text(self, member: tarfile.TarInfo) -> bytes:
        if member.size > MAX_RECORD_BYTES:
            raise ValueError(f"{member.name} is {member.size:,} bytes long")
        with self._archive.extractfile(member) as file:
            return file.read()


def _split(name: str) -> tuple[str, str]:
    """A member's key (its folder, and its file name up to the first dot) and its suffix (from that dot on)."""
    folder, slash, file = name.rpartition("/")
    stem, dot, suffix = file.partition(".")
    return f"{folder}{slash}{stem}", f"{dot}{suffix}"


def _in_named_order(media: list[TarMember], named: Any) -> list[TarMember]:
    """The media in the order in which the record names them; in the archive's order if it names none or others."""
    names = named if isinstance(named, list) else [named]
    by_name: dict[Any, TarMember] = {}
    for member in media:
        suffix = _split(member.name)[1]
        for alias in (member.name, Path(member.name).name, suffix, suffix.removeprefix(".")):
            by_name.setdefault(alias, member)
    known = bool(names) and all(isinstance(name, str) and name in by_name for name in names)
    return [by_name[name] for name in names] if known else media
