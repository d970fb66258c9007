"""The peak memory of a rank, to hold against the prediction."""

from typing import NamedTuple

import torch

from dflop.base.process_memory import process_bytes

__all__ = ["PeakMemory", "forget_peak", "peak_memory"]


class PeakMemory(NamedTuple):
    """Peak bytes since the start, or since `forget_peak`.

    - `held`: of the device, with CUDA's context, NCCL and what the allocator has reserved; of the process on CPUs.
    - `allocated`: in tensors, on a GPU; 0 on CPUs, where torch does not count them.
    """

    held: int
    allocated: int


def peak_memory(device: torch.device) -> PeakMemory:
    """The peak so far."""
    if device.type != "cuda":
        return PeakMemory(process_bytes("VmHWM"), 0)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return PeakMemory(outside + torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device))


def forget_peak(device: torch.device) -> None:
    """Forget the peak of a GPU so far: of starting up and the first steps, which hold more than later ones.

    Memory that is reserved and not in use is given back, because it would count as reserved for ever.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
