"""Progress of long work: a bar on a terminal, or one line a minute in a log file."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["progress_bar", "progress_line"]

_BETWEEN_LINES_S = 60


def progress_bar(**arguments: Any) -> "tqdm":
    """tqdm's bar; where stderr is no terminal, a bar that writes lines instead of drawing over itself.

    `arguments` are those of `tqdm`, which is imported here because few processes need it.
    """
    from tqdm import tqdm

    if sys.stderr.isatty():
        return tqdm(mininterval=0.2, **arguments)

    class Lines(tqdm):
        monitor_interval = 0  # tqdm would start a thread for each class that is made here, and leave it running
        _time = property(lambda self: time.monotonic, lambda self, wall_clock: None)  # tqdm's own clock may be set

        def display(self, *_: Any, **__: Any) -> bool:
            self.fp.write(f"{time.strftime('%H:%M:%S')}  {progress_line(self.format_dict)}\n")
            self.fp.flush()
            return True

        def close(self) -> None:
            self.disable = True

    every = {"mininterval": _BETWEEN_LINES_S, "delay": _BETWEEN_LINES_S, "miniters": 1}
    return Lines(**(arguments | every))


def progress_line(state: Mapping[str, Any]) -> str:
    """tqdm's `format_dict` as a line: `train.json: 1,200 of 40,000 records (3%), 60 a second, to go 0:10:47`."""
    done, total, unit = state["n"], state["total"], state["unit"].strip()
    rate = done / state["elapsed"] if state["elapsed"] else 0.0
    units = f" {unit}" if unit in ("", "s") or unit.endswith("s") else f" {unit}s"
    line = f"{state['prefix']}: " if state["prefix"] else ""
    line += (
        f"{done:,}{units.rstrip()}"
        if total is None
        else f"{done:,} of {total:,}{units.rstrip()} ({done / max(total, 1):.0%})"
    )
    line += f", {rate:,.3g} a second"
    if total and rate:
        line += f", to go {timedelta(seconds=round((total - done) / rate))}"
    return line + (f", {state['postfix']}" if state.get("postfix") else "")
