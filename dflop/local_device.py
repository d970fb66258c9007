"""The device of a rank that torchrun started."""

import os

import torch

from dflop.errors import UserError

__all__ = ["local_device"]


def local_device(kind: str) -> torch.device:
    """The CPU, or this rank's own GPU, which becomes the current one.

    Raises:
        UserError: when the node has fewer GPUs than ranks.
    """
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{os.environ['LOCAL_WORLD_SIZE']} rank(s) of this node want a GPU each (`cluster.device` is cuda), but "
            f"torch finds {torch.cuda.device_count()} GPU(s) here; correct `cluster.devices_per_node` or the job's "
            "GPUs, or set `cluster.device: cpu`"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
