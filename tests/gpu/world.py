"""A process group of one rank, with the backend that training has on this device."""

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from tests.gpu.check import Setting

__all__ = ["alone_in_world"]


@contextmanager
def alone_in_world(setting: Setting) -> Iterator[torch.device]:
    """The context in which this process is the only rank; gives its device."""
    device = torch.device(setting.device, 0) if setting.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(f"{folder}/store", 1),
            rank=0,
            world_size=1,
            device_id=device if device.type == "cuda" else None,
        )
        try:
            yield device
        finally:
            dist.destroy_process_group()
