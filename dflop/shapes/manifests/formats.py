"""The file formats of manifests: which reader opens a file or folder."""

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
    match path.suffix:
        case ".json" | ".jsonl":
            from dflop.shapes.manifests.json_text import open_json

            return open_json(path)
        case ".parquet":
            from dflop.shapes.manifests.tables import ParquetReader

            return ParquetReader(path)
        case ".tar":
            from dflop.shapes.manifests.tar import TarReader

            return TarReader(path)
    raise UserError(
        f"{path} is no manifest that can be read: known are .json, .jsonl, .parquet, uncompressed .tar (WebDataset), "
        ".yaml (a list of datasets) and folders that Hugging Face's `save_to_disk` wrote"
    )
