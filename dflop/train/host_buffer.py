"""Copies of a rank's tensors in the host's memory, in one buffer that is kept.

Beside GPUs the buffer is pinned. torch's allocator of pinned memory would round each tensor up to a power of two, and
never give it back; for a model of 7 B parameters that is up to 180 GB a node.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch

__all__ = ["HostBuffer"]

_ALIGNED_BYTES = 64


class HostBuffer:
    """One buffer, which grows to what is copied into it. `num_bytes` is its size."""

    def __init__(self) -> None:
        self._bytes, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    def copies_of(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies, in the order of `values`, of their shapes and dtypes. They are valid until the next call, and
        complete when this returns."""
        starts, end = [], 0
        for tensor in values:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        on_gpus = any(tensor.is_cuda for tensor in values)
        if end > self.num_bytes:
            self._allocate(end, is_pinned=on_gpus)
        copies = []
        for tensor, start in zip(values, starts, strict=True):
            copy = self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=True))
        if on_gpus:
            torch.cuda.synchronize()
        return copies

    def _allocate(self, num_bytes: int, *, is_pinned: bool) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0, dtype=torch.uint8)  # free the former one first
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self._is_pinned = is_pinned and _pin(self._bytes)


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory; False where the system refuses to pin so much. Copies then take longer and are as right."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
        return True
    _clear_error()
    return False


def _clear_error() -> None:
    """CUDA keeps the error of a refusal, and the next launch of a kernel would report it as its own."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
