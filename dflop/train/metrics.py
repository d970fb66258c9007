"""`metrics.jsonl`, a line a step: read, and repaired if the file was damaged."""

import json
from pathlib import Path
from typing import Any

from dflop.base import set_torn_aside, written_whole

__all__ = ["mend_metrics"]


def mend_metrics(path: Path, before_step: int | None = None) -> list[dict[str, Any]]:
    """The steps of `metrics.jsonl`, only those before `before_step` if it is given. All other lines are removed from
    the file.

    If there are damaged lines, such as one that was cut off, the original file is kept as `metrics.jsonl.torn`, with a
    warning.
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
    """The step that a line holds; None if the line is cut off or not a step's."""
    try:
        step = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return step if isinstance(step, dict) and isinstance(step.get("step"), int) and "loss" in step else None
