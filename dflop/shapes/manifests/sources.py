"""The sources of a dataset: the config's entries with their defaults filled in, and the files that each one names.

A source's path may be a pattern (`shards-{000..127}.tar`, `*.parquet`), or a YAML file in LLaVA-NeXT's form,
`datasets: [{json_path, sampling_strategy}, …]`, of which each entry becomes a source.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Any

from yaml import AliasEvent, BaseLoader, Node, YAMLError, load
from yaml.composer import ComposerError

from dflop.base import UserError
from dflop.config import SAMPLING, SAMPLING_FORMS, DataConfig, SourceConfig
from dflop.shapes.manifests.patterns import matches_of

__all__ = ["Source", "list_sources"]

_MAX_LIST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One manifest of the dataset with its defaults filled in; `path` may be a pattern."""

    name: str
    path: Path
    media_root: Path
    sampling: str = "all"
    trust_sizes: bool = False
    evaluation: bool = False
    columns: tuple[tuple[str, str], ...] = ()  # keys of a record, each with the manifest's own name for it
    epochs: float | None = None
    weight: float | None = None
    max_samples: int | None = None  # at most so many of the records that `sampling` keeps

    @property
    def label(self) -> str:
        """The manifest's folder and name, up to a pattern's first wildcard. Unlike `name` it does not depend on the
        other sources."""
        whole = Path(re.split(r"[*?\[{]", str(self.path))[0])
        return _plain_names(whole)[:2][-1]

    @property
    def key(self) -> str:
        """A digest of the settings that decide which samples this source's records become."""
        parts = [self.label, str(self.media_root), self.sampling, str(self.trust_sizes), *chain(*self.columns)]
        parts += [] if self.max_samples is None else [str(self.max_samples)]
        return sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()

    def renamed(self, raw: Any) -> Any:
        """A raw record with the manifest's own names replaced; one that lacks a named column lacks its key."""
        if not self.columns or not isinstance(raw, dict):
            return raw
        taken = {name for _, name in self.columns} | {key for key, _ in self.columns}
        kept = {key: value for key, value in raw.items() if key not in taken}
        return kept | {key: raw[name] for key, name in self.columns if name in raw}

    def check_media_root(self) -> None:
        """Raise `UserError` where the media root is no folder."""
        if not self.media_root.is_dir():
            raise UserError(
                f"the media root {self.media_root} (source `{self.name}`) is not a folder; correct "
                "`data.sources[].media_root`"
            )

    def files(self) -> list[Path]:
        """The manifest's files, in order.

        Raises:
            UserError: when there is none.
        """
        found: list[Path] = []
        for pattern, matches in matches_of(self.path):
            if not matches:
                raise UserError(
                    f"the manifest {pattern} (source `{self.name}`) does not exist; correct `data.sources` "
                    f"(relative paths start at {Path.cwd()})"
                )
            found += matches
        return found


def list_sources(data: DataConfig) -> list[Source]:
    """The configured sources; a list of datasets is replaced by its entries.

    A source has the name that the config gives it. Without one it is named after its manifest, with as many of its
    folders as are needed to make the name unique (`x-train`). If that is not enough, names are numbered.

    Raises:
        UserError: when there is no source, or a list of datasets cannot be read.
    """
    if not data.sources:
        raise UserError("`data.sources` is empty; name at least one manifest: `- {path: …/train.json}`")
    entries = list(chain.from_iterable(map(_open_lists, data.sources)))
    names = _tell_apart([names for _, names in entries])
    return [_fill_defaults(entry, name, data.max_samples) for (entry, _), name in zip(entries, names, strict=True)]


def _tell_apart(choices: Sequence[list[str]]) -> list[str]:
    """A name for each source: the first of its choices that no other source has, or its last one with a number."""
    left = list(choices)
    while shared := {name for name, uses in Counter(names[0] for names in left).items() if uses > 1}:
        longer = [names[1:] if names[0] in shared and len(names) > 1 else names for names in left]
        if longer == left:
            break
        left = longer
    unique: dict[str, None] = {}
    numbers: dict[str, Iterator[int]] = {}
    for name, *_ in left:
        its_name, number = name, numbers.setdefault(name, count(2))
        while its_name in unique:
            its_name = f"{name}-{next(number)}"
        unique[its_name] = None
    return list(unique)


def _open_lists(entry: SourceConfig) -> Iterator[tuple[SourceConfig, list[str]]]:
    """The entry with its possible names, the shortest first; for a list of datasets, the entries of that list.

    Raises:
        UserError: when a list of datasets cannot be read, or its entry has a sampling of its own or a weight.
    """
    path = Path(entry.path)
    if path.suffix not in (".yaml", ".yml"):
        yield entry, [entry.name] if entry.name else _plain_names(path)
        return
    if entry.sampling != "all":
        raise UserError(
            f"the source {path} is a list of datasets, each with its own `sampling_strategy`; "
            f"remove `sampling: {entry.sampling}`"
        )
    if entry.weight is not None:
        raise UserError(
            f"the source {path} is a list of datasets, and its `weight: {entry.weight:g}` would be that of each; name "
            "its manifests in `data.sources`, each with a weight"
        )
    for listed in _read_list(path):
        manifest = Path(listed["json_path"])
        if not manifest.is_absolute() and not _is_there(manifest) and _is_there(path.parent / manifest):
            manifest = path.parent / manifest
        names = [f"{entry.name}-{name}" if entry.name else name for name in _plain_names(manifest)]
        yield replace(entry, path=str(manifest), sampling=listed.get("sampling_strategy", "all")), names


def _is_there(path: Path) -> bool:
    """Whether there is a file for the first of the names that a path stands for."""
    _, files = next(matches_of(path), ("", []))
    return bool(files)


def _read_list(path: Path) -> list[dict[str, Any]]:
    """The entries of a list of datasets, checked.

    Raises:
        UserError: naming the file, and the entry that is wrong.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"the list of datasets {path} is no file; correct `data.sources`")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_LIST_BYTES + 1)
        if len(text) > _MAX_LIST_BYTES:
            raise YAMLError(f"it is longer than {_MAX_LIST_BYTES:,} characters")
        content = load(text, _PlainTexts)
    except FileNotFoundError:
        raise UserError(
            f"the list of datasets {path} does not exist; correct `data.sources` (relative paths start at {Path.cwd()})"
        ) from None
    except (OSError, UnicodeDecodeError, YAMLError, RecursionError) as error:
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
            raise UserError(f"{where}.sampling_strategy` is {sampling!r}; it must be {SAMPLING_FORMS}")
    return entries


class _PlainTexts(BaseLoader):
    """YAML in which every value is a text. Aliases are refused: few lines of them unfold to more than memory holds."""

    def compose_node(self, parent: Node, index: Any) -> Node:
        if self.check_event(AliasEvent):
            event = self.peek_event()
            raise ComposerError(None, None, f"write `*{event.anchor}` out", event.start_mark)
        return super().compose_node(parent, index)


def _fill_defaults(entry: SourceConfig, name: str, max_samples: int | None) -> Source:
    path = Path(entry.path)
    return Source(
        name=name,
        path=path,
        media_root=Path(entry.media_root) if entry.media_root else _folder_of(path),
        sampling=entry.sampling,
        trust_sizes=entry.trust_sizes,
        evaluation=entry.evaluation,
        columns=tuple(sorted(entry.columns.items())),
        epochs=entry.epochs,
        weight=entry.weight,
        max_samples=max_samples,
    )


def _plain_names(path: Path) -> list[str]:
    """Possible names for a file: its own, then with its folder's before it, then with that folder's parent, and so on.

    They hold only what a config's names may hold: ASCII letters, digits, dot, dash and underscore.
    """
    folders = [part for part in reversed(path.parent.parts) if part != "/"]
    named = accumulate([path.stem, *folders], lambda name, folder: f"{folder}-{name}")
    return [re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-._") or "source" for name in named]


def _folder_of(path: Path) -> Path:
    """The folder of a manifest; for a pattern, the deepest folder without a wildcard."""
    parents = list(path.parents)
    return next(parent for parent in parents if not any(sign in str(parent) for sign in "*?[{")) if parents else path
