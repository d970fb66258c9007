"""The index of a manifest: where every record of its files lies, and a digest of each.

An index is made in one pass and kept in `cache_folder` until its file's size or modification time changes, because
every job of the workflow needs it again. It is mapped into memory, 32 bytes a record, so that a job reads only the part
that it needs.
"""

from collections.abc import Iterator, Sequence, Set
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

from dflop.base import UserError, written_whole
from dflop.base.artifacts import cache_folder
from dflop.shapes.manifests.entries import DIGEST_BYTES, EntryReader, UnreadableFile
from dflop.shapes.manifests.formats import is_table, open_reader
from dflop.shapes.manifests.scan import NO_RECORD, write_index
from dflop.shapes.record_media import RecordError

__all__ = ["ManifestFile", "remove_outdated", "stamp_of"]

_FORMAT = 5
_ENTRY = np.dtype([("start", "<u8"), ("end", "<u8"), ("digest", f"V{DIGEST_BYTES}")])
_ENTRIES_AT_ONCE = 1 << 16
# The `end` of an index's last entry, whose `start` is the number of the others.
_END = (1 << 64) - 1


class ManifestFile:
    """One file (or saved dataset folder) of a manifest; records are numbered from 0.

    A file that cannot be read at all counts as one bad record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: EntryReader | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_unreadable(self) -> bool:
        return len(self) == 1 and self._entries[0].tobytes() == NO_RECORD

    def digests(self, rows: slice | np.ndarray) -> bytes:
        """The digests of these records, one after the other, `DIGEST_BYTES` each."""
        return np.ascontiguousarray(self._entries["digest"][rows]).tobytes()

    def digest_words(self) -> np.ndarray:
        """The last 8 bytes of every record's digest, which `records_below` does not use: uint64 [num_records]."""
        return np.frombuffer(self.digests(slice(None)), dtype="<u8").reshape(-1, DIGEST_BYTES // 8)[:, -1]

    def records_below(self, threshold: int) -> np.ndarray:
        """Records whose digest's first 8 bytes, as a number, fall below the threshold: int64, ascending."""
        found = []
        for first in range(0, len(self), _ENTRIES_AT_ONCE):
            digests = self.digests(slice(first, first + _ENTRIES_AT_ONCE))
            keys = np.frombuffer(digests, dtype=">u8").reshape(-1, DIGEST_BYTES // 8)[:, 0]
            found.append(first + np.flatnonzero(keys < np.uint64(min(threshold, (1 << 64) - 1))))
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def read(self, row: int) -> Any | RecordError:
        """The raw record at a row, or why it cannot be read."""
        entry = self._entries[row]
        if self.is_unreadable and is_table(self.path):  # opening it may end the process
            detail = (
                "it is damaged, unpacks to far more than its size, or has pages of over a gigabyte "
                "(write it with `row_group_size=100`)"
            )
            return RecordError("bad_record", f"the manifest {self.path} cannot be read: {detail}")
        try:
            if self._reader is None:
                self._reader = open_reader(self.path)
        except UnreadableFile as error:
            return RecordError("bad_record", str(error))
        return self._reader.read(int(entry["start"]), int(entry["end"]))

    @cached_property
    def _entries(self) -> np.ndarray:
        owner = sha256(str(self.path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:12]
        path = cache_folder() / f"records-{owner}-{stamp_of('records', _FORMAT, [self.path])}.bin"
        while (entries := _read_index(path)) is None:  # again, if another process finds the manifest changed
            with written_whole(path) as beside:
                write_index(self.path, beside)
                last = np.zeros(1, dtype=_ENTRY)
                last["start"], last["end"] = beside.stat().st_size // _ENTRY.itemsize, _END
                with beside.open("ab") as file:
                    file.write(last.tobytes())
            remove_outdated(f"records-{owner}-*.bin", {path})
        return entries


def _read_index(path: Path) -> np.ndarray | None:
    """The entries of an index; None if there is none, or one that is cut off."""
    try:
        entries = np.memmap(path, dtype=_ENTRY, mode="r")
    except (FileNotFoundError, ValueError):
        return None
    is_whole = (int(entries["start"][-1]), int(entries["end"][-1])) == (len(entries) - 1, _END)
    return entries[:-1] if is_whole else None


def stamp_of(kind: str, number: int, files: Sequence[Path]) -> str:
    """A digest of the files' paths, sizes and modification times, to name what is made from the files as they are now.

    `kind` and `number`, a format's version, are part of it.

    Raises:
        UserError: when a file does not exist, cannot be accessed, or is a pipe or device, which may have no end.
    """
    parts = [kind, str(number)]
    for path in files:
        for member in _members(path):
            try:
                stat = member.stat()
            except OSError as error:
                raise UserError(f"the manifest {member} cannot be read: {error.strerror}") from None
            if not S_ISREG(stat.st_mode):
                raise UserError(f"the manifest {member} is no file; name a file or a saved dataset's folder")
            parts.append(f"{member.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}")
    return sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:20]


def remove_outdated(pattern: str, current: Set[Path]) -> None:
    """Remove the files in the cache that match a pattern and are not current."""
    for path in cache_folder().glob(pattern):
        if path not in current:
            path.unlink(missing_ok=True)


def _members(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(member for member in path.iterdir() if member.is_file())
    else:
        yield path
