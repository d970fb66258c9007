"""Manifests as tables: Parquet files, and the folders that Hugging Face's `Dataset.save_to_disk` writes.

A row is a record, its columns the record's keys. Pictures, clips and sounds may be paths, or bytes inside the
table (`{bytes, path}`, as Hugging Face stores them, or a binary column).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflop.base import UserError
from dflop.shapes.manifests.entries import MAX_RECORD_BYTES, RecordSpan, UnreadableFile, digest_of
from dflop.shapes.records import RecordError

if TYPE_CHECKING:
    import pyarrow

__all__ = ["DatasetReader", "ParquetReader"]

# The most that is read from a file at once: embedded media make rows large.
_BATCH_ROWS = 256
_BATCH_BYTES = 16 << 20
_MAX_BATCH_BYTES = 128 << 20
# The most bytes of media in a row; its texts and numbers may have `MAX_RECORD_BYTES`.
_MAX_MEDIA_BYTES = 512 << 20
# A column's part that has more values, or that unpacks to over 256 MiB and a thousand times its size, is a trap.
_MAX_VALUES = 1 << 26
_LONG_BYTES, _MEDIA_RATIO = 32 << 20, 8
_MAX_UNPACKED_BYTES, _MAX_RATIO = 256 << 20, 1000
_MAX_ROWS_PER_BYTE = 8


class ParquetReader:
    """A Parquet file, read forwards, a few rows at a time. To go back, a row group is read again from its start.

    In memory are one page of each column, the least that can be decompressed, and the columns' dictionaries. Where a
    long text or medium stands in many rows, it stays in its dictionary until one of them is read.
    """

    def __init__(self, path: Path) -> None:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        self.path = path
        try:
            self._file = ParquetFile(path, memory_map=True)
            self._schema = self._file.schema_arrow
        except (ArrowException, OSError, ValueError, LookupError) as error:
            raise UnreadableFile(f"the manifest {path} is not a Parquet file that can be read: {error}") from None
        metadata = self._file.metadata
        self.size = metadata.num_rows
        if self.size > _MAX_ROWS_PER_BYTE * path.stat().st_size:
            raise UnreadableFile(f"the manifest {path} claims {self.size:,} rows, more than so small a file can hold")
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self._traps = list(map(_trap_in, groups))
        self._group_ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        self._batch_rows = [_batch_rows(group.total_byte_size, group.num_rows) for group in groups]
        self._group, self._is_small = -1, False
        # The same file, by the columns that stay in dictionaries.
        self._files: dict[tuple[str, ...], ParquetFile] = {}
        self._batches: Iterator[tuple[int, pyarrow.RecordBatch | RecordError]] = iter(())
        self._first, self._batch = 0, None

    def scan(self) -> Iterator[RecordSpan]:
        for row in range(self.size):
            yield _span(row, self.read(row, row + 1))

    def read(self, start: int, end: int) -> Any | RecordError:
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
        return _record(row, f"{self.path.name}, row {start:,}", is_small=self._is_small)

    def _read_group(self, group: int) -> "Iterator[tuple[int, pyarrow.RecordBatch | RecordError]]":
        """The batches of a row group, each with its first row; then an error, for the rows that cannot be read."""
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        row = int(self._group_ends[group - 1]) if group else 0
        detail = "it ends too early"
        try:
            if self._traps[group]:
                raise ValueError(self._traps[group])
            metadata = self._file.metadata
            texts = _columns_to_unpack_late(metadata.row_group(group))
            if texts not in self._files:
                how = {"metadata": metadata, "read_dictionary": list(texts)}
                self._files[texts] = ParquetFile(self.path, memory_map=True, **how)
            for batch in self._files[texts].iter_batches(
                self._batch_rows[group], row_groups=[group], use_threads=False
            ):
                self._is_small = _is_small(batch)
                yield row, batch.cast(self._schema) if self._is_small else batch
                row += batch.num_rows
        except (ArrowException, OSError, ValueError, LookupError) as error:
            detail = str(error)
        yield row, RecordError("bad_record", f"{self.path.name}, row group {group}: {detail}")

    def close(self) -> None:
        from pyarrow import default_memory_pool

        self._batches, self._batch = iter(()), None
        for file in (self._file, *self._files.values()):
            file.close()
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
        except Exception as error:  # the library does not say what it raises
            raise UserError(f"the dataset {path} cannot be read: {' '.join(str(error).split())}") from None
        self.size = len(self._rows)

    def scan(self) -> Iterator[RecordSpan]:
        step = _batch_rows(self._rows.data.nbytes, len(self._rows.data))
        for first in range(0, self.size, step):
            table = self._rows[first : first + step]
            is_small = _is_small(table)
            for offset in range(table.num_rows):
                row = first + offset
                where = f"{self.path.name}, row {row:,}"
                yield _span(row, _record(table.slice(offset, 1), where, is_small=is_small))

    def read(self, start: int, end: int) -> Any | RecordError:
        return _record(self._rows[start:end], f"{self.path.name}, row {start:,}")

    def close(self) -> None:
        del self._rows


def _batch_rows(num_bytes: int, num_rows: int) -> int:
    """How many rows are read at once from `num_rows` rows of `num_bytes`."""
    return int(np.clip(_BATCH_BYTES * num_rows // max(1, num_bytes), 1, _BATCH_ROWS))


def _columns_to_unpack_late(group: "pyarrow.parquet.RowGroupMetaData") -> tuple[str, ...]:
    """The columns whose values stay in dictionaries until they are counted: Arrow keeps all of a group's values then.

    A long column that hardly shrinks when it is packed is of media, which do not repeat.
    """
    columns = [group.column(number) for number in range(group.num_columns)]
    return tuple(
        column.path_in_schema
        for column in columns
        if column.physical_type == "BYTE_ARRAY"
        and (
            column.total_uncompressed_size < _LONG_BYTES
            or column.total_uncompressed_size > _MEDIA_RATIO * column.total_compressed_size
        )
    )


def _trap_in(group: "pyarrow.parquet.RowGroupMetaData") -> str:
    """Why a row group must not be unpacked; empty if it may be."""
    for number in range(group.num_columns):
        column = group.column(number)
        unpacked, packed = column.total_uncompressed_size, column.total_compressed_size
        if unpacked > max(_MAX_UNPACKED_BYTES, _MAX_RATIO * packed):
            return f"`{column.path_in_schema}` unpacks from {packed:,} to {unpacked:,} bytes"
        if column.num_values > _MAX_VALUES:
            return f"`{column.path_in_schema}` has {column.num_values:,} values; write smaller row groups"
    return ""


def _unpacked(column: "pyarrow.Array | pyarrow.ChunkedArray") -> complex:
    """The bytes of a column as Python would hold it: real those of texts and numbers, imaginary those of media."""
    from pyarrow import ChunkedArray, compute, types

    kind = column.type
    if isinstance(column, ChunkedArray):
        return sum(map(_unpacked, column.chunks), 0j)
    if types.is_dictionary(kind) and (types.is_string(kind.value_type) or types.is_binary(kind.value_type)):
        lengths = compute.binary_length(column.dictionary)
        num_bytes, kind = compute.sum(lengths.take(column.indices)).as_py() or 0, kind.value_type
    elif types.is_nested(kind) and hasattr(column, "flatten"):
        parts = column.flatten()
        return sum(map(_unpacked, parts if isinstance(parts, list) else [parts]), 0j)
    else:
        num_bytes = column.nbytes
    is_media = types.is_binary(kind) or types.is_large_binary(kind)
    return complex(0, num_bytes) if is_media else complex(num_bytes, 0)


def _is_small(rows: "pyarrow.Table | pyarrow.RecordBatch") -> bool:
    num_bytes = sum(map(_unpacked, rows.columns), 0j)
    return num_bytes.real + num_bytes.imag <= _MAX_BATCH_BYTES


def _record(
    row: "pyarrow.Table | pyarrow.RecordBatch", where: str, *, is_small: bool = False
) -> dict[str, Any] | RecordError:
    """One row of a table as a record. `is_small`: the rows that it is of have few bytes in all."""
    num_bytes = 0j if is_small else sum(map(_unpacked, row.columns), 0j)
    if num_bytes.real > MAX_RECORD_BYTES or num_bytes.imag > _MAX_MEDIA_BYTES:
        size = f"{int(num_bytes.real):,} bytes of text and {int(num_bytes.imag):,} of media"
        return RecordError("bad_record", f"{where}: {size}, more than a record may have")
    try:
        return row.to_pylist()[0]
    except ValueError as error:  # texts that are not UTF-8, columns of the same name
        return RecordError("bad_record", f"{where}: {error}")


def _span(row: int, record: Any | RecordError) -> RecordSpan:
    return RecordSpan(row, row + 1, digest_of(str(record) if isinstance(record, RecordError) else record))
