"""Manifests: reading the sources of a dataset and cutting them into shards.

A shard is a run of consecutive records. Cuts are chosen by the records' own content, so that an inserted
record changes the shard it falls into and leaves the others alone; a shard's name holds the digest of its
records. What a manifest's shards are is cached by the file's size and modification time, because every
Snakemake job asks again.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflop.artifacts import written_whole
from dflop.config import DataConfig, SourceConfig
from dflop.errors import UserError

__all__ = ["Shard", "Source", "list_shards", "list_sources", "read_manifest"]

_CACHE_FOLDER = Path(".snakemake/dflop")
_CACHE_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One manifest of the dataset with its defaults filled in."""

    name: str
    path: Path
    media_root: Path
    sampling: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Records `[start, start + num_records)` of those that a source's sampling keeps."""

    name: str
    source: str
    start: int
    num_records: int
    digest: str


def list_sources(data: DataConfig) -> list[Source]:
    """The configured sources; names are made unique.

    Raises:
        UserError: when there is no source.
    """
    if not data.sources:
        raise UserError("`data.sources` is empty; name at least one manifest: `- {path: …/train.json}`")
    sources: list[Source] = []
    taken: set[str] = set()
    for entry in data.sources:
        source = _fill_defaults(entry)
        name, number = source.name, 2
        while name in taken:
            name, number = f"{source.name}-{number}", number + 1
        taken.add(name)
        sources.append(Source(name=name, path=source.path, media_root=source.media_root, sampling=source.sampling))
    return sources


def _fill_defaults(entry: SourceConfig) -> Source:
    path = Path(entry.path)
    stem = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in path.stem)
    return Source(
        name=entry.name or stem,
        path=path,
        media_root=Path(entry.media_root) if entry.media_root else path.parent,
        sampling=entry.sampling,
    )


def read_manifest(source: Source, seed: int) -> list[Any]:
    """All raw records that the source's sampling keeps, in the manifest's order.

    Raises:
        UserError: when the file is missing or is not a JSON list.
    """
    try:
        text = source.path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"the manifest {source.path} (source `{source.name}`) does not exist; correct `data.sources` "
            f"(relative paths start at {Path.cwd()})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the manifest {source.path} cannot be read: {error}") from None
    try:
        if source.path.suffix == ".jsonl":
            # Not splitlines(), which also cuts at U+2028 and others that JSON texts may hold.
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            records = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"the manifest {source.path} is not JSON: {error}") from None
    if not isinstance(records, list):
        raise UserError(f"the manifest {source.path} holds a {type(records).__name__}; it must be a list of records")
    return [records[row] for row in _kept_rows(len(records), source, seed)]


def _kept_rows(num_records: int, source: Source, seed: int) -> Iterable[int]:
    if source.sampling == "all":
        return range(num_records)
    how, amount = source.sampling.split(":")
    wanted = float(amount.rstrip("%"))
    count = min(num_records, int(num_records * wanted / 100 if amount.endswith("%") else wanted))
    if how == "first":
        return range(count)
    if how == "end":
        return range(num_records - count, num_records)
    return sorted(random.Random(f"{seed}/{source.name}").sample(range(num_records), count))


def list_shards(source: Source, samples_per_shard: int, seed: int) -> list[Shard]:
    """The source's shards, from the cache when the manifest has not changed."""
    if source.path.is_file() and not source.media_root.is_dir():
        raise UserError(
            f"the media root {source.media_root} (source `{source.name}`) is not a folder; correct "
            "`data.sources[].media_root`"
        )
    try:
        stat = source.path.stat()
    except FileNotFoundError:
        stat = None
    except OSError as error:
        raise UserError(f"the manifest {source.path} cannot be read: {error}") from None
    if stat is None:
        return _cut(source, read_manifest(source, seed), samples_per_shard)
    key = [
        _CACHE_FORMAT,
        str(source.path.resolve()),
        stat.st_size,
        stat.st_mtime_ns,
        source.name,
        source.sampling,
        samples_per_shard,
        seed,
    ]
    cache = _CACHE_FOLDER / f"shards-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]}.json"
    if cache.is_file():
        return [Shard(**entry) for entry in json.loads(cache.read_text(encoding="utf-8"))]
    shards = _cut(source, read_manifest(source, seed), samples_per_shard)
    if os.access(".", os.W_OK):
        with written_whole(cache) as path:
            path.write_text(json.dumps([asdict(shard) for shard in shards]), encoding="utf-8")
    return shards


def _cut(source: Source, records: list[Any], samples_per_shard: int) -> list[Shard]:
    """Cut after records whose digest falls below a threshold, at about `samples_per_shard` records.

    Shards hold between a half and twice that number; the cuts after an insertion fall on the same records
    again as soon as one content-chosen cut is met.
    """
    least, most = max(1, samples_per_shard // 2), 2 * samples_per_shard
    threshold = (1 << 64) // max(1, samples_per_shard - least)
    shards: list[Shard] = []
    seen: dict[str, int] = {}
    start, running = 0, hashlib.sha256()
    for row, record in enumerate(records):
        line = hashlib.sha256(json.dumps(record, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        running.update(line.digest())
        size = row + 1 - start
        chosen = size >= least and int.from_bytes(line.digest()[:8], "big") < threshold
        if not (chosen or size >= most or row + 1 == len(records)):
            continue
        digest = running.hexdigest()
        seen[digest] = seen.get(digest, 0) + 1
        repeat = f"-{seen[digest]}" if seen[digest] > 1 else ""
        shards.append(
            Shard(
                name=f"{source.name}-{digest[:12]}{repeat}",
                source=source.name,
                start=start,
                num_records=size,
                digest=digest,
            )
        )
        start, running = row + 1, hashlib.sha256()
    return shards
