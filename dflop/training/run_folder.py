"""A run's folder: what training writes there, where it finds it again, and what becomes of another run's outputs.

This file imports no torch.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.training.generation import Generation

__all__ = ["OBSERVED", "RunFiles", "checkpoints_in", "clear_start", "find_checkpoint", "set_aside"]

# What is measured beside predictions, and all that a run leaves.
OBSERVED = ("observations", "observations.duckdb", "trace.json")
_OUTPUTS = ("checkpoints", "metrics.jsonl", "model", "summary.json", *OBSERVED)
_NUM_KEPT_ASIDE = 2
_CHECKPOINT = re.compile(r"step-(\d{6,})")
_ASIDE = re.compile(r"old-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """What training reads, and the folder it writes to.

    `measured_on` is the name of the device that the costs were measured on, None for analytic ones.
    """

    shapes: Path
    costs: Path
    plan: Path
    out: Path
    generation: Generation
    measured_on: str | None

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the latest one last."""
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)), key=lambda path: int(path.name[5:])
    )


def find_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The latest complete checkpoint and its `run.json`."""
    found = checkpoints_in(folder)
    return (found[-1], json.loads((found[-1] / "run.json").read_text(encoding="utf-8"))) if found else None


def set_aside(out: Path, names: tuple[str, ...] = _OUTPUTS) -> str:
    """Move outputs into `old-N` of the same folder, of which the last two are kept; says where they are."""
    earlier = sorted(int(match[1]) for path in out.iterdir() if (match := _ASIDE.fullmatch(path.name)))
    aside = out / f"old-{max(earlier, default=0) + 1}"
    aside.mkdir()
    for name in names:
        if (out / name).exists():
            (out / name).rename(aside / name)
    said = f"moved to {aside}"
    for number in earlier[: len(earlier) + 1 - _NUM_KEPT_ASIDE]:
        shutil.rmtree(out / f"old-{number}")
        said += f"; {out / f'old-{number}'} was removed, since the last {_NUM_KEPT_ASIDE} are kept"
    return said


def clear_start(out: Path) -> None:
    """Delete what a run left that ended before its first checkpoint."""
    (out / "metrics.jsonl").unlink(missing_ok=True)
    shutil.rmtree(out / "observations", ignore_errors=True)
