"""The files that a source's path stands for: braces (`shards-{000..127}.tar`), wildcards (`*.parquet`) and `**`.

Lists of datasets come from others. So a pattern may neither stand for too many names nor look through too many folders.
"""

import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from glob import has_magic
from math import prod
from pathlib import Path

from braceexpand import UnbalancedBracesError, braceexpand

from dflop.base import UserError

__all__ = ["matches_of"]

_MAX_CHARACTERS = 4096
_MAX_NAMES = 100_000
# Files and folders, of all folders that a pattern leads to: some seconds on a disk.
_MAX_LOOKED_AT = 1_000_000
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(\.\.-?\d+)?")
_LETTERS = re.compile(r"[A-Za-z]\.\.[A-Za-z](\.\.-?\d+)?")


def matches_of(path: Path) -> Iterator[tuple[str, list[Path]]]:
    """The patterns that a path with braces stands for, each with the files that it matches, in order.

    Raises:
        UserError: when they are too many, or when too many files would have to be looked at.
    """
    if len(str(path)) > _MAX_CHARACTERS:
        raise UserError(f"the pattern {str(path)[:80]}… has {len(str(path)):,} characters; correct `data.sources`")
    try:
        if _num_names(str(path)) > _MAX_NAMES:
            raise UserError(f"the pattern {path} stands for more than {_MAX_NAMES:,} names; correct `data.sources`")
        patterns = braceexpand(str(path))
    except UnbalancedBracesError:
        patterns = iter([str(path)])
    for pattern in patterns:
        yield (
            pattern,
            [Path(pattern)] if os.path.exists(pattern) else sorted(map(Path, _Search(pattern).found()), key=str),
        )


def _num_names(pattern: str) -> int:
    """The number of names that a pattern's braces stand for, without making them; too many rather than too few."""
    counts: list[int] = []

    def count(group: re.Match) -> str:
        if between := _RANGE.fullmatch(group[1]):
            counts.append(abs(int(between[2]) - int(between[1])) + 1)
        else:
            counts.append(52 if _LETTERS.fullmatch(group[1]) else sum(map(product, group[1].split(","))))
        return f"\0{len(counts) - 1}\0"

    def product(text: str) -> int:
        return prod(counts[int(number)] for number in re.findall(r"\0(\d+)\0", text))

    replaced = 1
    while replaced:
        pattern, replaced = _INNERMOST.subn(count, pattern)
    return product(pattern)


class _Search:
    """A search for the files of one pattern, as `glob.glob(pattern, recursive=True)` does it, with a limit."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._looked_at = 0

    def found(self) -> set[str]:
        path = Path(self._pattern)
        return set(self._below(path.anchor, path.relative_to(path.anchor).parts)) if has_magic(self._pattern) else set()

    def _below(self, folder: str, parts: tuple[str, ...]) -> Iterator[str]:
        """The files below a folder that match these parts of the pattern."""
        part, rest = parts[0], parts[1:]
        if not has_magic(part):
            path = os.path.join(folder, part)
            if os.path.exists(path):
                yield from self._below(path, rest) if rest else [path]
            return
        if part == "**" and rest:
            yield from self._below(folder, rest)
        for entry in self._entries(folder):
            if entry.name.startswith(".") and not part.startswith("."):
                continue
            if part == "**":
                if not rest:
                    yield entry.path
                if os.path.isdir(entry.path):
                    yield from self._below(entry.path, parts)
            elif fnmatch(entry.name, part):
                yield from self._below(entry.path, rest) if rest else [entry.path]

    def _entries(self, folder: str) -> list[os.DirEntry]:
        found = []
        try:
            with os.scandir(folder or ".") as entries:
                for entry in entries:
                    self._looked_at += 1
                    if self._looked_at > _MAX_LOOKED_AT:
                        raise UserError(
                            f"the pattern {self._pattern} leads to more than {_MAX_LOOKED_AT:,} files; "
                            "name the folder nearer to them"
                        )
                    found.append(entry)
        except OSError:  # no folder, or one that may not be read
            pass
        return found
