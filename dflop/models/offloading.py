"""Layers whose saved tensors wait for backward in host memory.

`offload_layers` puts hooks around the layers of a stage. In the forward of one of its first layers, what autograd saves
is copied to host memory, on a stream of its own, while later layers compute. `leaves_behind` says behind which layer
each of them has left: they are spread over the whole forward, so that the link is in use all the time. When backward
reaches that layer, the tensors come back, on another stream. Weights, tensors that all layers read (rotary positions)
and small tensors stay where they are.

Compiled layers are the same to these hooks: what the compiled function saves passes through them, too. On a CPU,
the copy counts as host memory, so `LiveBytes` does not see it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from dflop.plan.leaving import leaves_behind

__all__ = ["LEAST_BYTES", "offload_layers"]

# A smaller tensor costs more in calls than it frees.
LEAST_BYTES = 1 << 20


def offload_layers(layers: Sequence[nn.Module], num_offloaded: int) -> list[RemovableHandle]:
    """Have the first `num_offloaded` of these layers, which run one after another, keep saved tensors of `LEAST_BYTES`
    and more in host memory. Removing the handles ends it."""
    copies, handles = _Copies(), []
    passes: list[_Pass | None] = [None] * num_offloaded  # of the microbatch that is in forward
    ends = leaves_behind(num_offloaded, len(layers))
    for place, layer in enumerate(layers):
        if place < num_offloaded:
            handles += _Around(copies, passes, place).hook(layer)
        if leaving := [own for own, end in enumerate(ends) if end == place]:
            handles.append(layer.register_forward_hook(partial(_leave, passes, leaving)))
    return handles


def _leave(passes: "list[_Pass | None]", leaving: Sequence[int], layer: nn.Module, args: object, output: Any) -> None:
    """Free the device's memory of these layers' tensors, once they are copied, and have them come back when backward
    reaches this layer."""
    if _is_in_backward():
        return
    for place in leaving:
        own, passes[place] = passes[place], None
        if own is None:
            continue
        own.leave()
        result = output[0] if isinstance(output, tuple) else output
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(partial(_return, ref(own)))


def _return(own: "Callable[[], _Pass | None]", gradients: object) -> None:
    if (found := own()) is not None:
        found.bring()


def _is_in_backward() -> bool:
    """Whether a layer runs because it is recomputed: it then saves nothing, and nothing leaves behind it."""
    return torch._C._current_graph_task_id() != -1


class _Copies:
    """The streams of a stage's copies, one for each direction; none on a CPU, where copies take place at once."""

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}

    def stream(self, direction: str, device: torch.device) -> torch.cuda.Stream | None:
        """The stream, which waits for all that the computing stream has been given so far."""
        if device.type != "cuda":
            return None
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(device)
        self._streams[direction].wait_stream(torch.cuda.current_stream(device))
        return self._streams[direction]

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, which is ready when the stream of copies has come so far."""
        stream = self.stream("out", tensor.device)
        with _disable_current_modes():  # the host's memory does not count
            host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                return host.copy_(tensor, non_blocking=stream is not None)


class _Kept:
    """One storage that autograd saved: its copy in host memory, and `here`, on the device, while it is there."""

    def __init__(self, here: torch.Tensor, host: torch.Tensor) -> None:
        self.here: torch.Tensor | None = here
        self.host, self.device = host, here.device


class _Pass:
    """The saved tensors of one layer and one microbatch."""

    def __init__(self, copies: _Copies) -> None:
        self._copies = copies
        self._kept: list[Callable[[], _Kept | None]] = []  # autograd holds them
        self._sent: torch.cuda.Event | None = None
        self._arrival: torch.cuda.Event | None = None

    def add(self, kept: _Kept) -> None:
        self._kept.append(ref(kept))

    def end_of_layer(self) -> None:
        """Note when the copies of all tensors are made."""
        if (kept := self._present()) and (stream := self._copies.stream("out", kept[0].device)) is not None:
            self._sent = stream.record_event()

    def leave(self) -> None:
        """Free the tensors on the device, which computes no further before they are copied."""
        if self._sent is not None:
            torch.cuda.current_stream().wait_event(self._sent)
        for kept in self._present():
            kept.here = None

    def bring(self) -> None:
        """Begin to bring back what is not on the device."""
        away = [kept for own in self._kept if (kept := own()) is not None and kept.here is None]
        if not away:
            return
        # Memory of the computing stream, which may still be reading there what was before.
        for kept in away:
            kept.here = torch.empty_like(kept.host, device=kept.device, pin_memory=False)
        stream = self._copies.stream("back", away[0].device)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for kept in away:
                kept.here.copy_(kept.host, non_blocking=stream is not None)
        self._arrival = stream.record_event() if stream is not None else None

    def begin_backward(self, kept: _Kept) -> None:
        """Have `kept` on the device."""
        if kept.here is None:
            self.bring()
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)

    def _present(self) -> list[_Kept]:
        return [kept for own in self._kept if (kept := own()) is not None and kept.here is not None]


class _Around:
    """The hooks around one offloaded layer."""

    def __init__(self, copies: _Copies, passes: list[_Pass | None], place: int) -> None:
        self._copies, self._passes, self._place = copies, passes, place

    def hook(self, layer: nn.Module) -> list[RemovableHandle]:
        return [
            layer.register_forward_pre_hook(self._begin, with_kwargs=True),
            layer.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pass = _Pass(self._copies)
        # By storage and how often it was written. What is here lives until the layer ends, so no other storage takes
        # its place.
        self._known: dict[tuple[int, int], _Kept] = {}
        given = [own for own in (*args[1:], *kwargs.values()) if isinstance(own, (torch.Tensor, tuple))]
        flat = [own for one in given for own in (one if isinstance(one, tuple) else (one,))]
        self._shared = {_storage_of(own) for own in flat if isinstance(own, torch.Tensor)}
        self._layer = layer
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def _end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._hooks.__exit__(None, None, None)
        self._pass.end_of_layer()
        self._passes[self._place] = self._pass
        del self._pass, self._known, self._hooks, self._layer

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Packed":
        own = tensor.detach()
        if isinstance(own, DTensor) or own.untyped_storage().nbytes() < LEAST_BYTES:
            return own
        storage = _storage_of(own)
        key = storage, own._version
        if key not in self._known:
            weights = {_storage_of(weight) for weight in self._layer.parameters() if not isinstance(weight, DTensor)}
            if storage in weights | self._shared:
                return own
            whole = own.as_strided((own.untyped_storage().nbytes() // own.element_size(),), (1,), 0)
            self._known[key] = _Kept(whole, self._copies.send(whole))
            self._pass.add(self._known[key])
        return _Packed(self._pass, self._known[key], own)


class _Packed:
    """What autograd saves in a tensor's place."""

    def __init__(self, of_pass: _Pass, kept: _Kept, tensor: torch.Tensor) -> None:
        self._pass, self._kept = of_pass, kept
        self._form = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._dtype = tensor.dtype

    def unpacked(self) -> torch.Tensor:
        self._pass.begin_backward(self._kept)
        return self._kept.here.view(self._dtype).as_strided(*self._form)


def _unpack(packed: "torch.Tensor | _Packed") -> torch.Tensor:
    return packed.unpacked() if isinstance(packed, _Packed) else packed


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
