"""A source's records and its shards: runs of consecutive records that are profiled as one job.

Where shards are cut depends on the records' content, so that an inserted record changes its own shard and leaves most
others as they are. A shard's name depends on its source's path and settings, on its records and, if media are watched,
on the sizes and times of their files. It does not depend on the other sources or their order, so equal sources share
their shards.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b, sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflop.base import UserError, written_whole
from dflop.base.artifacts import cache_folder
from dflop.shapes.manifests.index import ManifestFile, remove_outdated, stamp_of
from dflop.shapes.manifests.sources import Source
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import media_paths

__all__ = ["Shard", "SourceRecords", "list_shards"]

_FORMAT = 5
_STAT_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Records `[start, start + num_records)` of those that a source's sampling keeps."""

    name: str
    start: int
    num_records: int
    digest: str


class SourceRecords:
    """The records of a source, over all its files; `row` counts from 0 through the files in order."""

    def __init__(self, source: Source, seed: int) -> None:
        """Open the source; its files are indexed the first time.

        Raises:
            UserError: when a file is missing or is not a manifest, or when no file can be read. If only some cannot be
                read, each of these is one bad record.
        """
        self.source = source
        self.seed = seed
        self.files = [ManifestFile(path) for path in source.files()]
        if all(file.is_unreadable for file in self.files):
            raise UserError(self.files[0].read(0).detail)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(file) for file in self.files))

    def __len__(self) -> int:
        """The number of records in the manifest, also of those that the sampling leaves out."""
        return self._ends[-1]

    @cached_property
    def kept(self) -> Sequence[int]:
        """The rows that the sampling keeps, at most `max_samples`, ascending: a range, or an int64 array for random
        sampling."""
        how, count = _amount_kept(self.source.sampling, len(self))
        if self.source.max_samples is not None:
            count = min(count, self.source.max_samples)
        if how == "random":
            words = np.concatenate([file.digest_words() for file in self.files])
            return _draw(words, count, key=f"{self.seed}/{self.source.label}")
        return range(len(self) - count, len(self)) if how == "end" else range(count)

    def read(self, row: int) -> Any | RecordError:
        """One raw record, with the keys that `Source.columns` renames, or why it cannot be read.

        Raises:
            IndexError: when the manifest has no such row.
        """
        file, offset = self._locate(row)
        return self.source.renamed(self.files[file].read(offset))

    def read_shard(self, shard: Shard, start: int = 0, end: int | None = None) -> Iterator[Any | RecordError]:
        """The raw records of a shard, or those at `[start, end)` in it."""
        rows = self.kept[shard.start : shard.start + shard.num_records][start:end]
        return (self.read(int(row)) for row in rows)

    def cuts_below(self, threshold: int) -> np.ndarray:
        """Positions among the kept rows of the records whose digest is below a threshold: int64, ascending."""
        found = [np.zeros(0, dtype=np.int64)]
        for file, end in zip(self.files, self._ends, strict=True):
            found.append(end - len(file) + file.records_below(threshold))
        rows = np.concatenate(found)
        if isinstance(self.kept, range):
            return rows[(rows >= self.kept.start) & (rows < self.kept.stop)] - self.kept.start
        positions = np.searchsorted(self.kept, rows)
        inside = positions < len(self.kept)
        inside[inside] = self.kept[positions[inside]] == rows[inside]
        return positions[inside]

    def digest(self, start: int, end: int) -> str:
        """The digest of the kept records at positions `[start, end)`, of which there must be at least one."""
        running = sha256()
        rows = self.kept[start:end]
        for number in range(bisect_right(self._ends, rows[0]), bisect_right(self._ends, rows[-1]) + 1):
            file, file_end = self.files[number], self._ends[number]
            first = file_end - len(file)
            if isinstance(rows, range):
                inside = slice(max(rows.start - first, 0), max(rows.stop - first, 0))
            else:
                inside = rows[np.searchsorted(rows, first) : np.searchsorted(rows, file_end)] - first
            running.update(file.digests(inside))
        return running.hexdigest()

    def _locate(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"the manifest {self.source.path} has {len(self)} records, none at row {row}")
        file = bisect_right(self._ends, row)
        return file, int(row) - (self._ends[file] - len(self.files[file]))


def list_shards(
    source: Source, samples_per_shard: int, seed: int, *, watch_media: bool = False, look_again: bool = True
) -> list[Shard]:
    """The source's shards, in order; from the cache if its files have not changed.

    With `watch_media` the sizes and times of all media are read at each call. With `look_again=False`, as in a
    workflow's jobs, the last result is used.

    Raises:
        UserError: when the manifest or its media root is missing, or the manifest holds no record or cannot be read.
    """
    files = source.files()
    source.check_media_root()
    # The seed matters to random sampling alone.
    asked = [str(source.path), source.key, samples_per_shard, seed if "random" in source.sampling else 0]
    if watch_media:
        asked.append(str(source.media_root.resolve()))
    owner = sha256(json.dumps([str(source.path.resolve()), *asked]).encode()).hexdigest()[:12]
    cache = cache_folder() / f"shards-{owner}-{stamp_of(json.dumps(asked), _FORMAT, files)}.json"
    if not (watch_media and look_again) and (kept := _read_shards(cache)):
        return kept
    records = SourceRecords(source, seed)
    shards = _cut(records, samples_per_shard)
    if not shards:
        raise UserError(
            f"the manifest {source.path} (source `{source.name}`) holds no record; fill it, or take it out of "
            "`data.sources`"
        )
    if watch_media:
        shards = _with_media(shards, records, owner)
    with written_whole(cache) as path:
        path.write_text(json.dumps([asdict(shard) for shard in shards]), encoding="utf-8")
    remove_outdated(f"shards-{owner}-*.json", {cache})
    return shards


def _read_shards(cache: Path) -> list[Shard]:
    """The shards that a file in the cache has; none where it is not there or damaged."""
    try:
        return [Shard(**entry) for entry in json.loads(cache.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def _amount_kept(sampling: str, num_records: int) -> tuple[str, int]:
    """Which records a sampling keeps (`first`, `end` or `random`), and how many of them."""
    if sampling == "all":
        return "first", num_records
    how, amount = sampling.split(":")
    wanted = float(amount.rstrip("%"))
    if amount.endswith("%"):
        # Rounded up, as LLaVA's own loader does; rounding first keeps 7 % of 100 from being 8.
        wanted = math.ceil(round(num_records * wanted / 100, 6))
    return how, min(num_records, int(wanted))


def _draw(words: np.ndarray, count: int, key: str) -> np.ndarray:
    """The `count` records with the smallest keyed hashes of their digests' words: int64, ascending.

    A record's hash does not depend on the other records, so an inserted record displaces at most one of those drawn.
    Equal records are numbered (first, second, …), so that their hashes differ.
    """
    by_word = np.argsort(words, kind="stable")
    ordered = words[by_word]
    begins = np.flatnonzero(np.diff(ordered, prepend=~ordered[:1]))  # where a run of equal words does
    copy = np.arange(len(words)) - np.repeat(begins, np.diff(begins, append=len(words)))
    salt = np.frombuffer(blake2b(key.encode(), digest_size=8).digest(), dtype="<u8")
    hashes = _mix(_mix(ordered ^ salt) + copy.astype(np.uint64))
    return np.sort(by_word[np.argsort(hashes)[:count]])


def _mix(words: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): uint64 -> uint64, every bit from all bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _cut(records: SourceRecords, samples_per_shard: int) -> list[Shard]:
    """Cut after records whose digest falls below a threshold, at about `samples_per_shard` records.

    Shards hold between half and twice that number. An inserted record moves the cuts behind it up to the next cut that
    is chosen by content; later ones stay.
    """
    least, most = max(1, samples_per_shard // 2), 2 * samples_per_shard
    cuts = records.cuts_below((1 << 64) // max(1, samples_per_shard - least))
    num_kept, start = len(records.kept), 0
    seen: dict[str, int] = {}
    shards: list[Shard] = []
    while start < num_kept:
        at = np.searchsorted(cuts, start + least - 1)
        chosen = int(cuts[at]) + 1 if at < len(cuts) else num_kept
        end = min(chosen, start + most, num_kept)
        shards.append(_shard(records.source, start, end - start, records.digest(start, end), seen))
        start = end
    return shards


def _shard(source: Source, start: int, num_records: int, digest: str, seen: dict[str, int]) -> Shard:
    """A shard, named by its source's manifest and a digest of source and records; repeated shards are numbered."""
    seen[digest] = seen.get(digest, 0) + 1
    repeat = f"-{seen[digest]}" if seen[digest] > 1 else ""
    name = f"{source.label}-{sha256(f'{source.key}/{digest}'.encode()).hexdigest()[:12]}{repeat}"
    return Shard(name=name, start=start, num_records=num_records, digest=digest)


def _with_media(shards: list[Shard], records: SourceRecords, owner: str) -> list[Shard]:
    """The shards with digests that cover the size and modification time of every media file."""
    root = str(records.source.media_root)
    seen: dict[str, int] = {}
    watched = []
    with ThreadPoolExecutor(_STAT_THREADS) as pool:  # threads, because `stat` is slow on network file systems
        for shard, paths in zip(shards, _media_of_shards(shards, records, owner), strict=True):
            running = sha256(shard.digest.encode())
            for line in pool.map(_stamp_files, [(root, part) for part in _parts(paths)]):
                running.update(line)
            watched.append(_shard(records.source, shard.start, shard.num_records, running.hexdigest(), seen))
    return watched


def _parts(paths: list[str], length: int = 512) -> Iterator[list[str]]:
    return (paths[first : first + length] for first in range(0, len(paths), length))


def _stamp_files(task: tuple[str, list[str]]) -> bytes:
    root, paths = task
    stamps = []
    for path in paths:
        try:
            stat = os.stat(os.path.join(root, path))
            stamps.append(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}")
        except (OSError, ValueError):
            stamps.append(f"{path}\0missing")
    return "\n".join(stamps).encode("utf-8", "surrogateescape")


def _media_of_shards(shards: list[Shard], records: SourceRecords, owner: str) -> Iterator[list[str]]:
    """The media paths that each shard's records name. They are cached, so that records are parsed only once."""
    caches = [cache_folder() / f"media-{owner}-{shard.digest[:20]}.parquet" for shard in shards]
    remove_outdated(f"media-{owner}-*.parquet", set(caches))
    for shard, cache in zip(shards, caches, strict=True):
        if not cache.is_file():
            paths = [path for raw in records.read_shard(shard) for path in media_paths(raw)]
            with written_whole(cache) as beside:
                pl.DataFrame({"path": paths}, schema={"path": pl.String}).write_parquet(beside)
        yield pl.read_parquet(cache)["path"].to_list()
