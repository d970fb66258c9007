"""A run's folder: the paths of what training writes and reads there, and what happens to another run's outputs.

This file does not import torch.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dflop.train.generation import Generation

__all__ = [
    "LAST_SUMMARY",
    "MeasuredOn",
    "RunFiles",
    "clear_start",
    "is_emulated",
    "set_aside",
    "set_observed_aside",
]

LAST_SUMMARY = "last_summary.json"
# The outputs that hold measurements with predictions, and all outputs of a run.
_OBSERVED = ("observations", "observations.duckdb", "trace.json")
_OUTPUTS = ("checkpoints", "metrics.jsonl", "model", "summary.json", LAST_SUMMARY, "tensorboard", "wandb", *_OBSERVED)
_NUM_KEPT_ASIDE = 2


class MeasuredOn(NamedTuple):
    """A device by its name, and the kernel of attention there (`kernel_name`), None in costs of earlier versions."""

    device: str
    attention: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """What training reads, and the folder it writes to. `measured_on` is what the costs were measured on, None for
    analytic ones."""

    shapes: Path
    costs: Path
    plan: Path
    out: Path
    generation: Generation
    measured_on: MeasuredOn | None

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


def set_aside(out: Path) -> str:
    """Move a run's outputs into `old-N` in the same folder, of which the last two are kept. Returns a text that says
    where they are."""
    return _moved(out, "old", _OUTPUTS)


def set_observed_aside(out: Path) -> str:
    """Move what was observed into `observed-N`: while costs and plans change, earlier runs are kept (`set_aside`)."""
    return _moved(out, "observed", _OBSERVED)


def _moved(out: Path, kind: str, names: tuple[str, ...]) -> str:
    numbers = (re.fullmatch(rf"{kind}-(\d+)", path.name) for path in out.iterdir())
    earlier = sorted(int(match[1]) for match in numbers if match)
    aside = out / f"{kind}-{max(earlier, default=0) + 1}"
    aside.mkdir()
    for name in names:
        if (out / name).exists():
            (out / name).rename(aside / name)
    # The workflow deletes summary.json, its declared output, before it trains again. The copy takes its place.
    if (aside / LAST_SUMMARY).exists():
        (aside / LAST_SUMMARY).replace(aside / "summary.json")
    said = f"moved to {aside}"
    for number in earlier[: len(earlier) + 1 - _NUM_KEPT_ASIDE]:
        shutil.rmtree(out / f"{kind}-{number}")
        said += f"; {out / f'{kind}-{number}'} was removed, since the last {_NUM_KEPT_ASIDE} are kept"
    return said


def is_emulated(out: Path) -> bool:
    """Whether a folder holds a run of the emulated cluster (`checks/emulation`), finished or not."""
    metrics = out / "metrics.jsonl"
    if not metrics.is_file():
        return False
    with metrics.open("rb") as file:
        return b'"emulated": true' in file.readline()


def clear_start(out: Path) -> None:
    """Delete the outputs of a run that ended before its first checkpoint."""
    (out / "metrics.jsonl").unlink(missing_ok=True)
    shutil.rmtree(out / "observations", ignore_errors=True)
