"""A run's folder: what training writes there, where it finds it again, and what becomes of another run's outputs.

This file imports no torch.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from dflop.training.generation import Generation

__all__ = ["LAST_SUMMARY", "OBSERVED", "RunFiles", "clear_start", "set_aside"]

LAST_SUMMARY = "last_summary.json"
# What is measured beside predictions, and all that a run leaves.
OBSERVED = ("observations", "observations.duckdb", "trace.json")
_OUTPUTS = ("checkpoints", "metrics.jsonl", "model", "summary.json", LAST_SUMMARY, "tensorboard", *OBSERVED)
_NUM_KEPT_ASIDE = 2
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


def set_aside(out: Path, names: tuple[str, ...] = _OUTPUTS) -> str:
    """Move outputs into `old-N` of the same folder, of which the last two are kept; says where they are."""
    earlier = sorted(int(match[1]) for path in out.iterdir() if (match := _ASIDE.fullmatch(path.name)))
    aside = out / f"old-{max(earlier, default=0) + 1}"
    aside.mkdir()
    for name in names:
        if (out / name).exists():
            (out / name).rename(aside / name)
    # The workflow deletes summary.json, which it declares, before it trains anew; what is kept beside takes its place.
    if (aside / LAST_SUMMARY).exists():
        (aside / LAST_SUMMARY).replace(aside / "summary.json")
    said = f"moved to {aside}"
    for number in earlier[: len(earlier) + 1 - _NUM_KEPT_ASIDE]:
        shutil.rmtree(out / f"old-{number}")
        said += f"; {out / f'old-{number}'} was removed, since the last {_NUM_KEPT_ASIDE} are kept"
    return said


def clear_start(out: Path) -> None:
    """Delete what a run left that ended before its first checkpoint."""
    (out / "metrics.jsonl").unlink(missing_ok=True)
    shutil.rmtree(out / "observations", ignore_errors=True)
