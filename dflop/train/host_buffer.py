"""The host's memory: copies of a rank's tensors in one buffer that is kept, and vectors that stay there.

Beside GPUs both are pinned. torch's allocator of pinned memory would round each tensor up to a power of two, and
never give it back; for a model of 7 B parameters that is up to 180 GB a node.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["HostBuffer", "host_zeros"]

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


def host_zeros(num_values: int, like: torch.Tensor) -> torch.Tensor:
    """A vector of a tensor's dtype in memory of its own, for as long as the process lives; pinned if the tensor is on a
    GPU. Elsewhere, pages that nobody writes take no memory. Where the tensor is fake, nothing counts as memory."""
    if isinstance(like, FakeTensor):
        return torch.zeros(num_values, dtype=like.dtype, device="meta")
    if not num_values:
        return torch.zeros(0, dtype=like.dtype)
    pages = mmap.mmap(-1, num_values * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=like.dtype)
    if like.is_cuda:
        _pin(memory)
    return memory


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory; False where the system refuses to pin so much. Copies then take longer and are as right."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    _clear_error()
    return False


def _clear_error() -> None:
    """CUDA keeps the error of a refusal, and the next launch of a kernel would report it as its own."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
