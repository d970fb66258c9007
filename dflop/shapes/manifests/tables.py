"""Manifests as tables: Parquet files, and the folders that Hugging Face's `Dataset.save_to_disk` writes.

A row is a record, its columns the record's keys. Pictures, clips and sounds may be paths, or bytes inside the
table (`{bytes, path}`, as Hugging Face stores them, or a binary column). A small table may unpack to any size, and its
metadata may lie about that, so `scan` reads it first, in a process whose memory is limited.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflop.base import UserError
from dflop.shapes.manifests.entries import MAX_RECORD_BYTES, RecordSpan, UnreadableFile, sizes_and_digest
from dflop.shapes.record_media import RecordError

if TYPE_CHECKING:
    import pyarrow

__all__ = ["DatasetReader", "ParquetReader"]

# The most that is read from a file at once: embedded media make rows large, and a value of a dictionary may stand in
# each.
_BATCH_ROWS = 8
_BATCH_BYTES = 16 << 20
# A table with more rows, text or media is a trap: no table of records that differ is packed as well.
_MOST_ROWS_PER_BYTE = 8
_MOST_UNPACKED_BYTES, _MOST_UNPACKED_PER_BYTE = 1 << 30, 10_000
# Texts that are not UTF-8, columns or fields of the same name, dates and time zones that Python does not have.
_NO_VALUES = (ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError)


class ParquetReader:
    """A Parquet file, read forwards, a few rows at a time. To go back, a row group is read again from its start.

    In memory are one page of each column, the least that can be decompressed, and the columns' dictionaries.
    """

    def __init__(self, path: Path) -> None:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        self.path = path
        try:
            self._file = ParquetFile(path, memory_map=True)
        except (ArrowException, OSError, ValueError, LookupError) as error:
            raise UnreadableFile(f"the manifest {path} is not a Parquet file that can be read: {error}") from None
        metadata = self._file.metadata
        self.size = metadata.num_rows
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self._group_ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        self._batch_rows = [_batch_rows(group.total_byte_size, group.num_rows) for group in groups]
        self._group = -1
        self._batches: Iterator[tuple[int, pyarrow.RecordBatch | RecordError]] = iter(())
        self._first, self._batch = 0, None

    def scan(self) -> Iterator[RecordSpan]:
        return _spans(self, self.path.stat().st_size, (self.read(row, row + 1) for row in range(self.size)))

    def read(self, start: int, end: int) -> Any | RecordError:
        if start == end:
            return _too_large(self.path, start)
        group = int(np.searchsorted(self._group_ends, start, side="right"))
        if group != self._group or start < self._first:
            self._batch, self._group = None, group  # free the old batch before the next one is read
            self._batches = self._read_group(group)
            self._first, self._batch = next(self._batches)
        while not isinstance(self._batch, RecordError) and start >= self._first + self._batch.num_rows:
            self._batch = None
            self._first, self._batch = next(self._batches)
        if isinstance(self._batch, RecordError):
            return self._batch
        row = self._batch.slice(start - self._first, end - start)
        return _record(row, f"{self.path.name}, row {start:,}")

    def _read_group(self, group: int) -> "Iterator[tuple[int, pyarrow.RecordBatch | RecordError]]":
        """The batches of a row group, each with its first row; then an error, for the rows that cannot be read."""
        from pyarrow import ArrowException

        row = int(self._group_ends[group - 1]) if group else 0
        detail = "it ends too early"
        try:
            for batch in self._file.iter_batches(self._batch_rows[group], row_groups=[group], use_threads=False):
                yield row, batch
                row += batch.num_rows
        except MemoryError:  # which is one of Arrow's, too
            raise
        except (ArrowException, OSError, ValueError, LookupError) as error:
            detail = str(error)
        yield row, RecordError("bad_record", f"{self.path.name}, row group {group}: {detail}")

    def close(self) -> None:
        from pyarrow import default_memory_pool

        self._batches, self._batch = iter(()), None
        self._file.close()
        default_memory_pool().release_unused()  # the pool would otherwise keep its peak size


class DatasetReader:
    """A folder that `Dataset.save_to_disk` wrote: Arrow files, mapped into memory, with random access to rows."""

    def __init__(self, path: Path) -> None:
        if (path / "dataset_dict.json").is_file():
            splits = ", ".join(sorted(entry.name for entry in path.iterdir() if (entry / "state.json").is_file()))
            raise UserError(f"{path} holds several splits ({splits}); name one: {path}/<split>")
        if not (path / "state.json").is_file():
            raise UserError(
                f"{path} is a folder, but not one that `Dataset.save_to_disk` wrote; name the files in it, "
                f"for example {path}/*.parquet"
            )
        from datasets import load_from_disk
        from datasets.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.path = path
        try:
            # As Arrow, so that pictures stay bytes or paths and are not decoded.
            self._rows = load_from_disk(str(path)).with_format("arrow")
        except MemoryError:
            raise
        except Exception as error:  # the library does not say what it raises
            raise UserError(f"the dataset {path} cannot be read: {' '.join(str(error).split())}") from None
        self.size = len(self._rows)

    def scan(self) -> Iterator[RecordSpan]:
        num_bytes = sum(entry.stat().st_size for entry in os.scandir(self.path))
        return _spans(self, num_bytes, self._records())

    def _records(self) -> Iterator[Any | RecordError]:
        step = _batch_rows(self._rows.data.nbytes, len(self._rows.data))
        for first in range(0, self.size, step):
            table = self._rows[first : first + step]
            for offset in range(table.num_rows):
                yield _record(table.slice(offset, 1), f"{self.path.name}, row {first + offset:,}")

    def read(self, start: int, end: int) -> Any | RecordError:
        if start == end:
            return _too_large(self.path, start)
        return _record(self._rows[start:end], f"{self.path.name}, row {start:,}")

    def close(self) -> None:
        del self._rows


def _batch_rows(num_bytes: int, num_rows: int) -> int:
    """How many rows are read at once from `num_rows` rows of `num_bytes`."""
    return int(np.clip(_BATCH_BYTES * num_rows // max(1, num_bytes), 1, _BATCH_ROWS))


def _record(row: "pyarrow.Table | pyarrow.RecordBatch", where: str) -> dict[str, Any] | RecordError:
    """One row of a table as a record."""
    try:
        return row.to_pylist()[0]
    except _NO_VALUES as error:
        for field, column in zip(row.schema, row.columns, strict=True):
            try:
                column.to_pylist()
            except _NO_VALUES as why:
                said = f"Python cannot hold the value of column {field.name} ({str(field.type)[:200]}): {why}"
                return RecordError("bad_record", f"{where}: {said}")
        return RecordError("bad_record", f"{where}: {error}")


def _spans(
    reader: ParquetReader | DatasetReader, num_bytes: int, records: Iterable[Any | RecordError]
) -> Iterator[RecordSpan]:
    """The spans of a table of `num_bytes`; that of a row with too much text is empty, and `read` says why.

    Raises:
        UnreadableFile: when it has more rows, text or media than so small a table can hold.
    """
    most = max(_MOST_UNPACKED_BYTES, _MOST_UNPACKED_PER_BYTE * num_bytes)
    if reader.size > _MOST_ROWS_PER_BYTE * num_bytes:
        raise UnreadableFile(f"the manifest {reader.path} claims {reader.size:,} rows in {num_bytes:,} bytes")
    for row, record in enumerate(records):
        text, media, digest = sizes_and_digest(str(record) if isinstance(record, RecordError) else record)
        most -= text + media
        if most < 0:
            raise UnreadableFile(f"the manifest {reader.path} unpacks to far more than its {num_bytes:,} bytes")
        yield RecordSpan(row, row + (text <= MAX_RECORD_BYTES), digest)


def _too_large(path: Path, row: int) -> RecordError:
    return RecordError("bad_record", f"{path.name}, row {row:,}: over {MAX_RECORD_BYTES:,} bytes of text")
