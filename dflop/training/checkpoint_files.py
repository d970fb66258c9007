"""What makes a checkpoint whole: its name, what its `run.json` says, and a checksum of every other file.

A checkpoint is a folder `step-000010` with tensors, `run.json`, and `checksums.json`, which is written last. One that
is damaged is moved aside, never deleted. This file imports no torch.
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
    """Why a checkpoint cannot be read."""


def checkpoints_in(folder: Path) -> list[Path]:
    """What has the name of a checkpoint in a folder, the latest one last."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)), key=_step_of)


def find_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The latest checkpoint whose `run.json` can be read, and what that says; its tensors are not looked at."""
    for path in reversed(checkpoints_in(folder)):
        try:
            return path, read_run(path)
        except Damaged:
            continue
    return None


def read_run(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's `run.json` says.

    Raises:
        Damaged: when there is none, or none of this checkpoint.
    """
    run = _read_json(checkpoint / "run.json")
    if not isinstance(run.get("step"), int) or not isinstance(run.get("restarts"), int):
        raise Damaged("its run.json names no step")
    if run["step"] != _step_of(checkpoint):
        raise Damaged(f"its run.json is of step {run['step']}")
    return run


def checksums_of(checkpoint: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Bytes and XXH3 digest of files of a checkpoint."""
    return {name: _checksum(checkpoint / name) for name in names}


def write_checksums(checkpoint: Path, checksums: Mapping[str, tuple[int, str]]) -> None:
    (checkpoint / _CHECKSUMS).write_text(json.dumps(checksums, indent=0), encoding="utf-8")


def damage_in(checkpoint: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """What of a checkpoint is not as it was written; None where all is. Files are shared out over `num_parts` callers,
    the largest first."""
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
    """Give a damaged checkpoint a name under which nothing looks for it; returns that."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{number}")
    return checkpoint.rename(aside)


def _step_of(checkpoint: Path) -> int:
    return int(_CHECKPOINT.fullmatch(checkpoint.name)[1])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except NotADirectoryError:
        raise Damaged("it is no folder") from None
    except FileNotFoundError:
        raise Damaged(f"it has no {path.name}") from None
    except (OSError, ValueError) as error:
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
