"""Memory of this process and of the machine, as Linux counts it."""

import math
import re
from pathlib import Path

__all__ = ["available_bytes", "process_bytes"]


def process_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS (memory now) or VmHWM (its peak); 0 where there is no such file."""
    found = _field(Path("/proc/self/status"), field)
    return 0 if found is None else found


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that processes may still take without swapping; infinite where that is not known.

    This is the smaller of what the machine has free and what the limit of the process's control group (a container or
    a Slurm job) leaves.
    """
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
