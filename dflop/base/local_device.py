"""The device of a rank that torchrun started, and its name."""

import os
from pathlib import Path

import torch

from dflop.base.errors import UserError
from dflop.base.numa import stay_near

__all__ = ["device_name", "local_device"]


def local_device(kind: str) -> torch.device:
    """The CPU, or this rank's own GPU, which becomes the current one; the rank then stays on the cores beside it.

    From then on convolutions in fp32 compute in fp32, as products of matrices do; torch's default for them is TF32.

    Raises:
        UserError: on every rank of a node that has fewer GPUs than ranks.
    """
    torch.backends.cudnn.allow_tf32 = False
    if kind == "cpu":
        return torch.device("cpu")
    num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if num_ranks > torch.cuda.device_count():
        raise UserError(
            f"{num_ranks} rank(s) of this node want a GPU each (`cluster.device` is cuda), but "
            f"torch finds {torch.cuda.device_count()} GPU(s) here; correct `cluster.devices_per_node` or the job's "
            "GPUs, or set `cluster.device: cpu`"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    of_ranks = [torch.cuda.get_device_properties(number) for number in range(num_ranks)]
    addresses = [f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0" for own in of_ranks]
    stay_near(addresses, device.index)
    return device


def device_name(device: torch.device) -> str:
    """The maker's name for the device: the GPU's name, or the processor's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")
