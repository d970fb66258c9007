"""Keeping a rank on the cores beside its GPU: memory and interrupts of the other socket cost it copies and launches.

torchrun's `--numa-binding` does the same, but it needs the program numactl, and ends the job where it fails.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["cores_near", "leave_cores_near", "stay_near"]

# Set to 0, it leaves ranks on all cores.
_VARIABLE = "DFLOP_NUMA_BINDING"
# The cores that a rank could use before, as the processes that it starts read them.
_ALL_CORES = "DFLOP_ALL_CORES"
# A rank computes backward, talks to NCCL and copies checkpoints in threads beside its own.
_FEWEST_CORES = 4


def stay_near(addresses: Sequence[str], rank: int) -> None:
    """Keep this process, with its threads and the processes that it starts, on the cores beside its GPU.

    `addresses` are the PCI addresses of the GPUs of this node's ranks, and `rank` is this one's place among them.
    Nothing changes where the machine does not say which cores these are, or this process may use too few of them for
    all ranks beside them: a job may have most of its cores on the other socket. Processes that do not use the GPU leave
    these cores again (`leave_cores_near`)."""
    os.environ.pop(_ALL_CORES, None)  # of a training that started this one
    if os.environ.get(_VARIABLE) == "0":
        return
    all_cores = os.sched_getaffinity(0)
    of_ranks = [cores_near(address) for address in addresses]
    near = of_ranks[rank] & all_cores
    if not near or len(near) < _FEWEST_CORES * of_ranks.count(of_ranks[rank]):
        return
    os.environ[_ALL_CORES] = ",".join(map(str, sorted(all_cores)))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it may have ended
            os.sched_setaffinity(int(thread), near)


def leave_cores_near() -> None:
    """Let this process, which a rank has started, use all cores that the rank could use before `stay_near`. Loaders of
    all ranks beside one socket would else share its cores, while others have nothing to do."""
    if cores := os.environ.get(_ALL_CORES):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, map(int, cores.split(",")))


def cores_near(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """The cores beside the PCI device with this address, e.g. `0000:0a:00.0`; empty where that is not known."""
    try:
        text = (devices / address / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
