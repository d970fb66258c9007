"""Bytes of the tensors that are alive, counted as operations make them: what CPUs do not tell of their memory."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {_storage_key(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                key = _storage_key(tensor)
                if key not in given and key not in self._known:
                    self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def forget(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
