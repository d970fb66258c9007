"""Layers whose saved tensors wait for backward in host memory.

`offload_layers` puts hooks around layers. In a layer's forward, what autograd saves is copied to host memory, on a
stream of its own; the device's copy is freed at the end of the next layer's forward. When backward begins with a
layer, the tensors of the layer before it start to come back. So the device holds those of two offloaded layers at
most. Weights, tensors that all layers read (rotary positions) and small tensors stay where they are.

Compiled layers are the same to these hooks: what the compiled function saves passes through them, too. On a CPU,
the copy counts as host memory, so `LiveBytes` does not see it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

__all__ = ["LEAST_BYTES", "offload_layers"]

# A smaller tensor costs more in calls than it frees.
LEAST_BYTES = 1 << 20


def offload_layers(layers: Sequence[nn.Module], following: nn.Module | None) -> list[RemovableHandle]:
    """Have these layers, which run one after another, keep saved tensors of `LEAST_BYTES` and more in host memory.

    The layer `following` keeps its own; when it has run, the last layer's tensors leave the device, and they come back
    ahead of its backward. Without one, they leave with the next pass. Removing the handles ends it.
    """
    copies, handles = _Copies(), []
    for place, layer in enumerate(layers):
        around = _Around(copies, LEAST_BYTES, is_first=place == 0)
        handles += around.hook(layer)
    if layers and following is not None:
        handles += _Around(copies, None, is_first=False).hook(following)
    return handles


class _Copies:
    """The copies of a stage's layers: their stream, the pass before, and the tensors that are about to leave."""

    def __init__(self) -> None:
        self.before: Callable[[], _Pass | None] = _nothing
        self._leaving: list[_Kept] = []
        self._left: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream of copies; None on a CPU, where they take place at once."""
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, which is ready when the stream of copies has come so far."""
        stream = self.stream(tensor.device)
        with _disable_current_modes():  # the host's memory does not count
            host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
            if stream is None:
                return host.copy_(tensor)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                return host.copy_(tensor, non_blocking=True)

    def end_of_layer(self, sent: Sequence["_Kept"]) -> None:
        """Free the tensors of the layer before, once they are copied. Those that this layer `sent` are freed at the
        end of the next one."""
        if self._left is not None:
            torch.cuda.current_stream().wait_event(self._left)
        for kept in self._leaving:
            kept.here = None
        self._leaving = list(sent)
        self._left = self._stream.record_event() if self._stream is not None and sent else None


class _Kept:
    """One storage that autograd saved: its copy in host memory, and `here`, on the device, while it is there."""

    def __init__(self, here: torch.Tensor, host: torch.Tensor) -> None:
        self.here: torch.Tensor | None = here
        self.host, self.device = host, here.device


class _Pass:
    """The saved tensors of one layer and one microbatch."""

    def __init__(self, copies: _Copies, before: "Callable[[], _Pass | None]") -> None:
        self._copies, self._before = copies, before
        self._kept: list[Callable[[], _Kept | None]] = []
        self._arrival: torch.cuda.Event | None = None
        self._has_begun = False

    def add(self, kept: _Kept) -> None:
        self._kept.append(ref(kept))

    def bring(self) -> None:
        """Begin to bring back what is not on the device."""
        away = [kept for own in self._kept if (kept := own()) is not None and kept.here is None]
        if not away:
            return
        stream = self._copies.stream(away[0].device)
        # Memory of the computing stream, which may still be reading there what was before.
        for kept in away:
            kept.here = torch.empty_like(kept.host, device=kept.device, pin_memory=False)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(away[0].device))
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for kept in away:
                kept.here.copy_(kept.host, non_blocking=stream is not None)
        self._arrival = stream.record_event() if stream is not None else None

    def begin_backward(self, kept: _Kept | None) -> None:
        """Have `kept` on the device, and the layer before on its way."""
        if kept is not None and kept.here is None:
            self.bring()
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
        if not self._has_begun:
            self._has_begun = True
            if (before := self._before()) is not None:
                before.bring()


class _Around:
    """The hooks around one layer. With `least_bytes` None, the layer only has the one before it come back."""

    def __init__(self, copies: _Copies, least_bytes: int | None, *, is_first: bool) -> None:
        self._copies, self._least_bytes, self._is_first = copies, least_bytes, is_first

    def hook(self, layer: nn.Module) -> list[RemovableHandle]:
        return [
            layer.register_forward_pre_hook(self._begin, with_kwargs=True),
            layer.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pass = _Pass(self._copies, _nothing if self._is_first else self._copies.before)
        # By storage. What is here lives until the layer ends, so no other storage takes its place.
        self._known: dict[int, _Kept] = {}
        given = [own for own in (*args[1:], *kwargs.values()) if isinstance(own, (torch.Tensor, tuple))]
        flat = [own for one in given for own in (one if isinstance(one, tuple) else (one,))]
        self._shared = {_storage_of(own) for own in flat if isinstance(own, torch.Tensor)}
        self._layer = layer
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def _end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._hooks.__exit__(None, None, None)
        self._copies.end_of_layer(list(self._known.values()))
        self._copies.before = ref(self._pass)
        del self._pass, self._known, self._hooks, self._layer

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Packed":
        own = tensor.detach()
        if self._least_bytes is None:
            return _Packed(self._pass, None, own)
        if isinstance(own, DTensor) or own.untyped_storage().nbytes() < self._least_bytes:
            return own
        key = _storage_of(own)
        if key not in self._known:
            weights = {_storage_of(weight) for weight in self._layer.parameters() if not isinstance(weight, DTensor)}
            if key in weights | self._shared:
                return own
            whole = own.as_strided((own.untyped_storage().nbytes() // own.element_size(),), (1,), 0)
            self._known[key] = _Kept(whole, self._copies.send(whole))
            self._pass.add(self._known[key])
        return _Packed(self._pass, self._known[key], own)


class _Packed:
    """What autograd saves in a tensor's place."""

    def __init__(self, of_pass: _Pass, kept: _Kept | None, tensor: torch.Tensor) -> None:
        self._pass, self._kept = of_pass, kept
        self._tensor = tensor if kept is None else None
        self._form = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._dtype = tensor.dtype

    def unpacked(self) -> torch.Tensor:
        self._pass.begin_backward(self._kept)
        if self._kept is None:
            return self._tensor
        return self._kept.here.view(self._dtype).as_strided(*self._form)


def _unpack(packed: "torch.Tensor | _Packed") -> torch.Tensor:
    return packed.unpacked() if isinstance(packed, _Packed) else packed


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nothing() -> None:
    return None
