"""Keeping a rank on the cores beside its GPU: memory and interrupts of the other socket cost it copies and launches.

torchrun's `--numa-binding` does the same, but it needs the program numactl, and ends the job where it fails.
"""

import contextlib
import os
from pathlib import Path

import torch

__all__ = ["cores_near", "stay_near"]

# Set to 0, it leaves ranks on all cores.
_VARIABLE = "DFLOP_NUMA_BINDING"


def stay_near(device: torch.device) -> None:
    """Keep this process, with its threads and the processes that it starts, on the cores beside a GPU. Nothing changes
    where the machine does not say which these are, or this process may use none of them."""
    if os.environ.get(_VARIABLE) == "0":
        return
    of_device = torch.cuda.get_device_properties(device)
    address = f"{of_device.pci_domain_id:04x}:{of_device.pci_bus_id:02x}:{of_device.pci_device_id:02x}.0"
    near = cores_near(address) & os.sched_getaffinity(0)
    if not near:
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it may have ended
            os.sched_setaffinity(int(thread), near)


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
