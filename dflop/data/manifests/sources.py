"""The sources of a dataset: which files each one names, and what its defaults are.

A source's path may be a pattern (`shards-{000..127}.tar`, `*.parquet`), or a YAML file in LLaVA-NeXT's form,
`datasets: [{json_path, sampling_strategy}, …]`, which stands for one source an entry.
"""

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from braceexpand import UnbalancedBracesError, braceexpand
from yaml import YAMLError, safe_load

from dflop.config import SAMPLING, DataConfig, SourceConfig
from dflop.errors import UserError

__all__ = ["Source", "list_sources"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One manifest of the dataset with its defaults filled in; `path` may be a pattern."""

    name: str
    path: Path
    media_root: Path
    sampling: str = "all"
    trust_sizes: bool = False

    def files(self) -> list[Path]:
        """The manifest's files, in order.

        Raises:
            UserError: when there is none.
        """
        found: list[Path] = []
        for pattern, matches in _matches(self.path):
            if not matches:
                raise UserError(
                    f"the manifest {pattern} (source `{self.name}`) does not exist; correct `data.sources` "
                    f"(relative paths start at {Path.cwd()})"
                )
            found += matches
        return found


def _matches(path: Path) -> Iterator[tuple[str, list[Path]]]:
    """The patterns that a path with braces stands for, each with the files that it matches, in order."""
    try:
        patterns = list(braceexpand(str(path)))
    except UnbalancedBracesError:
        patterns = [str(path)]
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        yield pattern, list(map(Path, matches))


def list_sources(data: DataConfig) -> list[Source]:
    """The configured sources, lists of datasets opened; names are made unique.

    Raises:
        UserError: when there is no source, or a list of datasets cannot be read.
    """
    if not data.sources:
        raise UserError("`data.sources` is empty; name at least one manifest: `- {path: …/train.json}`")
    sources: list[Source] = []
    taken: set[str] = set()
    for source in chain.from_iterable(map(_open_lists, data.sources)):
        name, number = source.name, 2
        while name in taken:
            name, number = f"{source.name}-{number}", number + 1
        taken.add(name)
        sources.append(replace(source, name=name))
    return sources


def _open_lists(entry: SourceConfig) -> Iterator[Source]:
    path = Path(entry.path)
    if path.suffix not in (".yaml", ".yml"):
        yield _fill_defaults(entry)
        return
    if entry.sampling != "all":
        raise UserError(
            f"the source {path} is a list of datasets, each with its own `sampling_strategy`; "
            f"remove `sampling: {entry.sampling}`"
        )
    for listed in _read_list(path):
        manifest = Path(listed["json_path"])
        if not manifest.is_absolute() and not _is_there(manifest) and _is_there(path.parent / manifest):
            manifest = path.parent / manifest
        name = f"{entry.name}-{_plain_name(manifest)}" if entry.name else None
        sampling = listed.get("sampling_strategy", "all")
        yield _fill_defaults(replace(entry, path=str(manifest), sampling=sampling, name=name))


def _is_there(path: Path) -> bool:
    return any(matches for _, matches in _matches(path))


def _read_list(path: Path) -> list[dict[str, Any]]:
    """The entries of a list of datasets, checked.

    Raises:
        UserError: naming the entry that is not as it should be.
    """
    try:
        content = safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"the list of datasets {path} does not exist; correct `data.sources` (relative paths start at {Path.cwd()})"
        ) from None
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise UserError(f"the list of datasets {path} cannot be read: {' '.join(str(error).split())}") from None
    entries = content.get("datasets") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} must hold `datasets:`, a list of entries with `json_path` and `sampling_strategy`")
    for index, entry in enumerate(entries):
        where = f"{path}: `datasets[{index}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("json_path"), str):
            raise UserError(f"{where}` is {entry!r}; it must hold `json_path`, a manifest's path")
        unknown = sorted(map(str, set(entry) - {"json_path", "sampling_strategy"}))
        if unknown:
            raise UserError(f"{where}.{unknown[0]}` is unknown; an entry holds `json_path` and `sampling_strategy`")
        sampling = entry.get("sampling_strategy", "all")
        if not isinstance(sampling, str) or not SAMPLING.fullmatch(sampling):
            raise UserError(
                f"{where}.sampling_strategy` is {sampling!r}; it must be all, first:30%, first:1000, end:… or random:…"
            )
    return entries


def _fill_defaults(entry: SourceConfig) -> Source:
    path = Path(entry.path)
    return Source(
        name=entry.name or _plain_name(path),
        path=path,
        media_root=Path(entry.media_root) if entry.media_root else _folder_of(path),
        sampling=entry.sampling,
        trust_sizes=entry.trust_sizes,
    )


def _plain_name(path: Path) -> str:
    """A file's name as a config may give it: ASCII letters, digits, dot, dash and underscore."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).strip("-._") or "source"


def _folder_of(path: Path) -> Path:
    """The folder that a manifest lies in; of a pattern, the last one before its first sign."""
    parents = list(path.parents)
    return next(parent for parent in parents if not any(sign in str(parent) for sign in "*?[{")) if parents else path
