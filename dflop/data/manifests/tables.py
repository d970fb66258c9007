"""Manifests as tables: Parquet files, and the folders that Hugging Face's `Dataset.save_to_disk` writes.

A row is a record, its columns the record's keys. Pictures, clips and sounds may be paths, or bytes inside the
table (`{bytes, path}`, as Hugging Face stores them, or a binary column).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflop.data.manifests.formats import Span, digest_of
from dflop.data.records import RecordError
from dflop.errors import UserError

if TYPE_CHECKING:
    import pyarrow

__all__ = ["DatasetReader", "ParquetReader"]

# Rows taken from the file at once while scanning: embedded media make rows large.
_BATCH_ROWS = 256


class ParquetReader:
    """A Parquet file. Reading a row takes its row group into memory, and keeps it for the rows that follow."""

    def __init__(self, path: Path) -> None:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        self.path = path
        try:
            self._file = ParquetFile(path, memory_map=True)
        except (ArrowException, OSError, ValueError) as error:
            raise UserError(f"the manifest {path} is not a Parquet file that can be read: {error}") from None
        metadata = self._file.metadata
        self.size = metadata.num_rows
        group_rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._group_ends = np.cumsum(group_rows, dtype=np.int64)
        self._loaded: tuple[int, pyarrow.Table | RecordError] | None = None

    def scan(self) -> Iterator[Span]:
        for row in range(self.size):
            yield _span(row, self.read(row, row + 1))

    def read(self, start: int, end: int) -> Any | RecordError:
        group = int(np.searchsorted(self._group_ends, start, side="right"))
        if self._loaded is None or self._loaded[0] != group:
            self._loaded = None  # the old group goes before the new one comes
            self._loaded = (group, self._load(group))
        table = self._loaded[1]
        if isinstance(table, RecordError):
            return table
        first = int(self._group_ends[group]) - table.num_rows
        return _record(table.slice(start - first, end - start), f"{self.path.name}, row {start:,}")

    def _load(self, group: int) -> "pyarrow.Table | RecordError":
        from pyarrow import ArrowException

        try:
            return self._file.read_row_group(group)
        except (ArrowException, OSError, ValueError) as error:
            return RecordError("bad_record", f"{self.path.name}, row group {group}: {error}")

    def close(self) -> None:
        self._file.close()


class DatasetReader:
    """A folder that `Dataset.save_to_disk` wrote: Arrow files, mapped into memory, any row at once."""

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
            # As Arrow, so that pictures stay the bytes or paths that they are.
            self._rows = load_from_disk(str(path)).with_format("arrow")
        except Exception as error:  # the library raises whatever its readers raise
            raise UserError(f"the dataset {path} cannot be read: {' '.join(str(error).split())}") from None
        self.size = len(self._rows)

    def scan(self) -> Iterator[Span]:
        for first in range(0, self.size, _BATCH_ROWS):
            table = self._rows[first : first + _BATCH_ROWS]
            for offset in range(table.num_rows):
                row = first + offset
                yield _span(row, _record(table.slice(offset, 1), f"{self.path.name}, row {row:,}"))

    def read(self, start: int, end: int) -> Any | RecordError:
        return _record(self._rows[start:end], f"{self.path.name}, row {start:,}")

    def close(self) -> None:
        del self._rows


def _record(row: "pyarrow.Table", where: str) -> dict[str, Any] | RecordError:
    """A table of one row as a record."""
    try:
        return row.to_pylist()[0]
    except ValueError as error:  # texts that are not UTF-8, columns of the same name
        return RecordError("bad_record", f"{where}: {error}")


def _span(row: int, record: Any | RecordError) -> Span:
    return Span(row, row + 1, digest_of(str(record) if isinstance(record, RecordError) else record))
