"""AdamW whose state waits in host memory between steps.

A step takes the state part by part: while one part is updated on the device, the next comes, and the one before goes
back, each on a stream of its own. Source: Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme
scale deep learning", 2021, section 5.2.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.adamw import adamw

from dflop.plan.leaving import values_of_part
from dflop.train.adamw import MOMENTS, AdamW, Rates
from dflop.train.host_buffer import host_zeros

__all__ = ["OffloadedAdamW", "make_adamw"]

# The masters and the two moments of a part.
_KINDS = ("masters", *MOMENTS)


def make_adamw(
    rates: Mapping[nn.Parameter, Rates], device: torch.device, *, offloads: bool, has_masters: bool
) -> "AdamW | OffloadedAdamW":
    """AdamW with its state on `device`, or in host memory where it `offloads` any."""
    return OffloadedAdamW(rates, device, has_masters=has_masters) if offloads and rates else AdamW(rates)


class _Part(NamedTuple):
    """A range of a tensor's values that is updated at a time: `held` are those of its state in host memory, by kind."""

    tensor: nn.Parameter
    values: slice
    held: dict[str, torch.Tensor]


class _Slot:
    """Memory on the device for one part, by kind, and what has happened to it."""

    def __init__(self, kinds: tuple[str, ...], num_values: int, like: torch.Tensor, *, has_streams: bool) -> None:
        self.memory = {kind: like.new_empty(num_values) for kind in kinds}
        self._events = {name: torch.cuda.Event() for name in ("came", "went")} if has_streams else {}

    def note(self, name: str, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            self._events[name].record(stream)

    def after(self, name: str, stream: torch.cuda.Stream | None) -> None:
        """Have the stream wait for what was noted last."""
        if stream is not None:
            stream.wait_event(self._events[name])


class OffloadedAdamW:
    """`AdamW` with its moments in host memory, and with the updated tensors themselves where `has_masters`: these are
    then in host memory, too (`host_zeros`), and `AdamW.step`'s `computed` are on `device`.

    All tensors have one dtype.
    """

    def __init__(self, rates: Mapping[nn.Parameter, Rates], device: torch.device, *, has_masters: bool) -> None:
        self._rates, self._device, self._num_steps = rates, device, 0
        on_device = next(iter(rates)).detach().new_zeros(0, device=device)
        self._moments = {tensor: {name: host_zeros(tensor.numel(), on_device) for name in MOMENTS} for tensor in rates}
        kinds, size = _KINDS if has_masters else MOMENTS, int(values_of_part(sum(tensor.numel() for tensor in rates)))
        self._parts = list(self._in_parts(has_masters, size))
        self._come, self._go = _streams(device)
        self._slots = [_Slot(kinds, size, on_device, has_streams=self._come is not None) for _ in range(2)]

    def _in_parts(self, has_masters: bool, size: int) -> Iterator[_Part]:
        for tensor, moments in self._moments.items():
            held = {"masters": tensor.detach(), **moments} if has_masters else moments
            for start in range(0, tensor.numel(), max(1, size)):
                values = slice(start, start + size)
                yield _Part(tensor, values, {kind: own[values] for kind, own in held.items()})

    @property
    def on_device(self) -> list[torch.Tensor]:
        """What of the state is always on the device."""
        return [memory for slot in self._slots for memory in slot.memory.values()]

    @torch.no_grad()
    def step(
        self,
        lr_factor: float,
        gradients: Mapping[nn.Parameter, torch.Tensor],
        computed: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """`AdamW.step`. It returns before the state is back in host memory (`wait`)."""
        computing = torch.cuda.current_stream(self._device) if self._come is not None else None
        if self._come is not None:
            self._come.wait_stream(self._go)  # the last step's state
            self._come.wait_stream(computing)  # on which the slots' memory was had
        for number, part in enumerate(self._parts):
            slot = self._slots[number % 2]
            slot.after("went", self._come)
            here = {kind: slot.memory[kind][: len(own)] for kind, own in part.held.items()}
            with _on(self._come):
                for kind, own in part.held.items():
                    here[kind].copy_(own, non_blocking=True)
            slot.note("came", self._come)
            slot.after("came", computing)
            self._update(part, here, lr_factor, gradients[part.tensor], computed.get(part.tensor))
            if self._go is not None:
                self._go.wait_stream(computing)
            with _on(self._go):
                for kind, own in part.held.items():
                    own.copy_(here[kind], non_blocking=True)
            slot.note("went", self._go)
        self._num_steps += 1

    def _update(
        self,
        part: _Part,
        here: Mapping[str, torch.Tensor],
        lr_factor: float,
        gradient: torch.Tensor,
        computed: torch.Tensor | None,
    ) -> None:
        rates, masters = self._rates[part.tensor], here.get("masters")
        if masters is None:
            masters = part.tensor.detach().view(-1)[part.values]
        adamw(
            [masters],
            [gradient.reshape(-1)[part.values]],
            [here[MOMENTS[0]]],
            [here[MOMENTS[1]]],
            [],
            [torch.full((), float(self._num_steps), device=self._device)],
            fused=True,
            amsgrad=False,
            beta1=rates.betas[0],
            beta2=rates.betas[1],
            lr=rates.lr * lr_factor,
            weight_decay=rates.weight_decay,
            eps=rates.eps,
            maximize=False,
        )
        if computed is not None:
            computed[part.values].copy_(masters)

    def wait(self) -> None:
        """Return when the state is in host memory."""
        if self._go is not None:
            self._go.synchronize()

    def moments_of(self, tensor: nn.Parameter) -> dict[str, torch.Tensor]:
        """The two moments of a tensor's values, flattened, in host memory, where masters then are, too."""
        self.wait()
        return self._moments[tensor]

    def go_on_from(self, num_steps: int) -> None:
        """`AdamW.go_on_from`."""
        self._num_steps = num_steps


def _streams(device: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
    """The streams on which the state comes and goes; none on a CPU, where copies take place at once."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
