"""`metrics.jsonl`: a line a step, read and mended after whatever happened to the file."""

import json
from pathlib import Path
from typing import Any

from dflop.runtime import set_torn_aside, written_whole

__all__ = ["mend_metrics"]


def mend_metrics(path: Path, before_step: int | None = None) -> list[dict[str, Any]]:
    """The steps of `metrics.jsonl`, those before `before_step` where it is given; afterwards the file holds no others.

    Where lines are no step's, such as one that was cut, the file as it was goes to `metrics.jsonl.torn`, and that is
    said.
    """
    written = path.read_bytes() if path.exists() else b""
    steps, kept, torn = [], [], []
    for line in written.splitlines():
        step = _step_of(line)
        if step is None:
            torn.append(line + b"\n")
        elif before_step is None or step["step"] < before_step:
            steps.append(step)
            kept.append(line + b"\n")
    if torn:
        set_torn_aside(path, f"{len(torn)} of its lines are no whole step, and are left out")
    if b"".join(kept) != written:
        with written_whole(path) as beside:
            beside.write_bytes(b"".join(kept))
    return steps


def _step_of(line: bytes) -> dict[str, Any] | None:
    """What a line says of its step; None where it is cut, or none of ours."""
    try:
        step = json.loads(line)
    except ValueError:
        return None
    return step if isinstance(step, dict) and isinstance(step.get("step"), int) and "loss" in step else None
