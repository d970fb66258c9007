"""Bytes of the tensors that are alive, counted as operations make them: torch does not count memory on CPUs."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveBytes", "storage_key", "tensors_in"]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make inside this context: `now`, and their `peak`.

    A tensor counts as long as its storage lives. Resized storages count by their new size: FSDP2 makes and frees
    gathered parameters by resizing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> "LiveBytes":
        resize = torch.UntypedStorage.resize_  # not an operation, so a dispatch mode does not see it

        def note_and_resize(storage: torch.UntypedStorage, size: int) -> Any:
            if storage._cdata in self._known:
                self._set_size(storage._cdata, size)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = note_and_resize
        self._resize = resize
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*raised)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._note_made(tensors_in((args, kwargs or {})), tensors_in((result,)))
        return result

    def _note_made(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """Note the storages of an operation's results but those that it was given."""
        given = set(map(storage_key, inputs))
        for tensor in outputs:
            key = storage_key(tensor)
            if key not in given and key not in self._known and tensor.device.type != "meta":
                self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata

        def forget(_: object) -> None:
            self._set_size(key, 0)
            del self._known[key], self._sizes[key]

        self._known[key] = weakref.ref(storage, forget)
        self._set_size(key, storage.nbytes())

    def _set_size(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results. torch's `tree_iter` takes some five times as long."""
    found = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list | dict):
            found += tensors_in(value)
    return found
