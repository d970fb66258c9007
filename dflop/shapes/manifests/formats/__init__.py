"""The file formats of manifests, one in each file, which is named as the suffix: `parquet.py` opens `data.parquet`.

A new format is one more file, whose `open_file` takes a path and gives an `EntryReader`.
"""

import importlib
import pkgutil
from pathlib import Path

from dflop.base import UserError
from dflop.shapes.manifests.entries import EntryReader

__all__ = ["open_reader"]


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
    known = {f".{file.name}": file.name for file in pkgutil.iter_modules(__path__)}
    if path.suffix in known:
        return importlib.import_module(f"{__name__}.{known[path.suffix]}").open_file(path)
    raise UserError(
        f"{path} is no manifest that can be read: known are {', '.join(known)} (archives uncompressed, as of "
        "WebDataset), .yaml (a list of datasets) and folders that Hugging Face's `save_to_disk` wrote"
    )
