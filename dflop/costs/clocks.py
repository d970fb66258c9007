"""A GPU's clocks: bringing them to those of a loaded card before something is timed, and reading them."""

import time

import torch

__all__ = ["keep_busy", "sm_mhz"]

# Seconds of load by the type of device, and the size of the matrices that are multiplied, a few of them at a time.
_LOAD_S = {"cuda": 0.1, "cpu": 0.0}
_SIZE, _NUM_PRODUCTS = 4096, 16


def keep_busy(device: torch.device) -> None:
    """Load a GPU for 100 ms; on CPUs do nothing.

    A cool card that is asked for a few milliseconds of work runs at higher clocks than one that trains, and an idle one
    at lower clocks.
    """
    end = time.monotonic() + _LOAD_S[device.type]
    matrix = None
    while time.monotonic() < end:
        if matrix is None:
            matrix = torch.randn(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)
        for _ in range(_NUM_PRODUCTS):
            torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def sm_mhz(device: torch.device) -> float | None:
    """The clock of a GPU's multiprocessors under load, in MHz; None on CPUs, and without the package nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        from pynvml import NVMLError
    except ImportError:
        return None
    keep_busy(device)
    try:
        return float(torch.cuda.clock_rate(device))
    except (NVMLError, RuntimeError):  # such as on a part of a card (MIG)
        return None
