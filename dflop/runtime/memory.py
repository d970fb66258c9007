"""Memory of this process and of the machine, as Linux counts it."""

import math
import re
from pathlib import Path

__all__ = ["available_bytes", "process_bytes"]


def process_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS (now) or VmHWM (at most); 0 where there is no such file."""
    found = _field(Path("/proc/self/status"), field)
    return 0 if found is None else found


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """What processes may still take without swapping, of the machine and of the control group that a container or a
    Slurm job is; infinite where neither says."""
    found = _field(Path("/proc/meminfo"), "MemAvailable")
    free = math.inf if found is None else float(found)
    try:
        most, now = ((cgroup / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return free if most == "max" else min(free, float(most) - float(now))
    except (OSError, ValueError):
        return free


def _field(path: Path, name: str) -> int | None:
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
