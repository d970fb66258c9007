"""What process groups take: bytes of the device and seconds each, made in the ways in which training makes them.

A world of one rank shows the least: connections to other ranks come on top.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dflop.base.message_group import message_group
from dflop.base.process_memory import process_bytes
from dflop.train.groups import GROUP_TIMEOUT
from tests.gpu.check import Figures, Setting
from tests.gpu.world import alone_in_world

__all__ = ["bytes_and_seconds"]

_COUNTS = (1, 8, 25)


def bytes_and_seconds(setting: Setting) -> Figures:
    """Of each way, the mean over the first group, over the first 8 and over the first 25."""
    figures = {}
    with alone_in_world(setting) as device:
        ways: dict[str, Callable[[], dist.ProcessGroup]] = {
            "new_group": lambda: dist.new_group([0], timeout=GROUP_TIMEOUT),
            "a channel of messages": lambda: message_group(device, GROUP_TIMEOUT),
        }
        if device.type == "cuda":
            ways["split_group"] = lambda: dist.split_group(split_ranks=[[0]], timeout=GROUP_TIMEOUT)
        for way, make in ways.items():
            before, started, made = _used_bytes(device), time.perf_counter(), []
            for count in _COUNTS[:1] if setting.is_tiny else _COUNTS:
                while len(made) < count:
                    made.append(make())
                    dist.all_reduce(torch.zeros(1, device=device), group=made[-1])
                figures[f"seconds a group of {count}, {way}"] = (time.perf_counter() - started) / count
                figures[f"bytes a group of {count}, {way}"] = (_used_bytes(device) - before) / count
            for group in made:
                dist.destroy_process_group(group)
    return figures


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return process_bytes("VmRSS")
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
