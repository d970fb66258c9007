"""Seconds of what a device computes, by its own clock."""

import statistics
import time
from collections.abc import Callable

import torch

from dflop.base.devices import DeviceModel, find_device

__all__ = ["copied_bytes_per_s", "data_sheet", "seconds_of"]

_COPIED_BYTES = 2**30


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median seconds of a call, after two that warm up: CUDA events on a GPU, the host's clock on a CPU."""
    for _ in range(2):
        call()
    return statistics.median(_once(call, device) for _ in range(repeats))


def _once(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def copied_bytes_per_s(device: torch.device, num_bytes: int = _COPIED_BYTES) -> float:
    """Bytes read and written a second by a copy inside the device: what its memory gives."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def data_sheet(device: torch.device) -> DeviceModel | None:
    """What is known of this card; None of a CPU, and of a card that is not in `devices.yaml`."""
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    family = next((name for name in ("h100", "h200", "a100", "a800") if name in about.name.lower()), "")
    gigabytes = {"h100": 96 if about.total_memory > 85e9 else 80, "h200": 141}.get(family, 80)
    return find_device(f"{family}-{gigabytes}g")
