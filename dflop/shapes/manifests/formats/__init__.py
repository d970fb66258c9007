"""The file formats of manifests, one in each file, which is named as the suffix: `parquet.py` opens `data.parquet`.

A new format is one more file, whose `open_file` takes a path and gives an `EntryReader`. With `IS_TABLE = True` files
of it are scanned in a process of their own, as a small one may unpack to gigabytes (`manifests.scan`).
"""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from dflop.base import UserError
from dflop.shapes.manifests.entries import EntryReader

__all__ = ["is_table", "open_reader"]


def open_reader(path: Path) -> EntryReader:
    """The reader for a file or folder, by its suffix.

    Raises:
        UnreadableFile: for a file whose content is not what its suffix says.
        UserError: for a suffix or folder that no reader knows.
    """
    # Imported where needed: each format has libraries of its own, and a workflow's jobs open few of them.
    if path.is_dir():
        from dflop.shapes.manifests.tables import DatasetReader

        return DatasetReader(path)
    if path.suffix in _suffixes():
        return _format_of(path).open_file(path)
    raise UserError(
        f"{path} is no manifest that can be read: known are {', '.join(_suffixes())} (tar files uncompressed, as of "
        "WebDataset), .yaml (a list of datasets) and folders that Hugging Face's `save_to_disk` wrote"
    )


def is_table(path: Path) -> bool:
    """Whether it is a table: a folder that `save_to_disk` wrote, or a file of a format with `IS_TABLE`."""
    return path.is_dir() or (path.suffix in _suffixes() and getattr(_format_of(path), "IS_TABLE", False))


def _suffixes() -> list[str]:
    return [f".{file.name}" for file in pkgutil.iter_modules(__path__)]


def _format_of(path: Path) -> ModuleType:
    return importlib.import_module(f"{__name__}{path.suffix}")
