"""What makes a checkpoint whole: its name, what its `run.json` says, and a checksum of every other file.

A checkpoint is a folder `step-000010` with tensors, `run.json`, and `checksums.json`, which is written last. A damaged
checkpoint is moved aside and never deleted. This file does not import torch.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

__all__ = [
    "Damaged",
    "checkpoints_in",
    "checksums_of",
    "damage_in",
    "find_checkpoint",
    "move_aside",
    "read_run",
    "write_checksums",
]

_CHECKPOINT = re.compile(r"step-([0-9]{6,12})")
_CHECKSUMS = "checksums.json"
_READ_BYTES = 8 * 2**20


class Damaged(Exception):
    """A checkpoint cannot be read; the message says why."""


def checkpoints_in(folder: Path) -> list[Path]:
    """The paths in a folder that have a checkpoint's name, in the order of steps."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)), key=_step_of)


def find_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The latest checkpoint whose `run.json` can be read, and the content of that file. Tensors are not checked."""
    for path in reversed(checkpoints_in(folder)):
        try:
            return path, read_run(path)
        except Damaged:
            continue
    return None


def read_run(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint's `run.json`.

    Raises:
        Damaged: when there is none, it cannot be read, or it belongs to another step.
    """
    run = _read_json(checkpoint / "run.json")
    if not isinstance(run.get("step"), int) or not isinstance(run.get("restarts"), int):
        raise Damaged("its run.json names no step")
    match run.get("generation", {"weights": {}, "prices": ""}):
        case {"weights": dict(weights), "prices": str(), **others} if not others:
            is_known = all(isinstance(value, str) for value in weights.values())
        case _:
            is_known = False
    if not is_known:
        raise Damaged("its run.json names no generation")
    if run["step"] != _step_of(checkpoint):
        raise Damaged(f"its run.json is of step {run['step']}")
    return run


def checksums_of(checkpoint: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """The size in bytes and the XXH3 digest of some files of a checkpoint, by name."""
    return {name: _checksum(checkpoint / name) for name in names}


def write_checksums(checkpoint: Path, checksums: Mapping[str, tuple[int, str]]) -> None:
    """Write the sizes and digests of a checkpoint's files, as `damage_in` reads them."""
    (checkpoint / _CHECKSUMS).write_text(json.dumps(checksums, indent=0), encoding="utf-8")


def damage_in(checkpoint: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """What is damaged in a checkpoint; None if nothing is. Of `num_parts` callers, each checks every `num_parts`-th
    file, from number `part` on, the largest files first."""
    try:
        expected = _read_json(checkpoint / _CHECKSUMS)
        names = sorted(expected, key=lambda name: (-expected[name][0], name))
        for name in names[part::num_parts]:
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            size, digest = expected[name]
            if (is_of := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {is_of} of {size} bytes"
            if _checksum(checkpoint / name)[1] != digest:
                return f"{name} is not as it was written (its checksum is another)"
    except Damaged as damage:
        return str(damage)
    except (OSError, TypeError, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def move_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not found again; returns its new path."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{number}")
    return checkpoint.rename(aside)


def has_damaged(folder: Path) -> bool:
    """Whether checkpoints in this folder were found damaged, and moved aside."""
    return any(folder.glob("damaged-*"))


def _step_of(checkpoint: Path) -> int:
    return int(_CHECKPOINT.fullmatch(checkpoint.name)[1])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except NotADirectoryError:
        raise Damaged("it is no folder") from None
    except FileNotFoundError:
        raise Damaged(f"it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"its {path.name} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise Damaged(f"its {path.name} holds no mapping")
    return values


def _checksum(path: Path) -> tuple[int, str]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
