"""The executor: one rank's instructions of a step, carried out with torch and process groups.

The rank may carry several nodes: each has a `StageWork` that computes for it. Sizes of everything received are known
from the schedule, so nothing is exchanged to learn them. Sends are asynchronous, and each message takes the wire that
`routes` gives it. A tensor from one node to another of the same rank is handed over without a copy. The ranks of a
worker carry out the same instructions, each with wires of its own.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from dflop.step.instructions import Instruction, Op, Span
from dflop.step.routes import Edge

__all__ = ["Links", "StageWork", "Waits", "Wire", "run_instructions"]


class StageWork(Protocol):
    """The computations of one node. Mappings hold tensors by the index of their edge; edges without data have none."""

    def edge_shape(self, microbatch: int, edge: int) -> tuple[int, ...] | None:
        """Shape of the tensor that travels over an edge, the same in both directions; None where none does."""

    def prepare(self, microbatch: int) -> None:
        """Wait until the microbatch's own inputs are at hand; this wait does not count as computing."""

    def forward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compute, and return the tensor for each outgoing edge."""

    def backward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Take the gradients of the tensors that `forward` returned; return those of the tensors it received."""

    def sync_gradients(self) -> None:
        """Sum the gradients over the node's replicas."""


class Wire(NamedTuple):
    """The rank at the other end, and the process group that messages between the two take."""

    peer: int
    group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """One rank's ends of a program's edges.

    `sends` and `receives` are keyed by (edge, is forward): over an edge a rank sends to any number of others, and
    receives from one. `inner` are the edges of which the rank carries both ends. `shared` are those over which other
    ranks of the receiving node get messages; all ranks of this node must take the same values, so the tensor that is
    handed over inside this rank is rounded as a message is.
    """

    edges: tuple[Edge, ...]
    sends: Mapping[tuple[int, bool], tuple[Wire, ...]]
    receives: Mapping[tuple[int, bool], Wire]
    inner: Collection[int]
    shared: Collection[tuple[int, bool]]
    device: torch.device
    dtype: torch.dtype


@dataclass(slots=True)
class Waits:
    """When the host waited for inputs and for messages, each (start, end) on its monotonic clock.

    `peers` is None where the host does not wait for messages, since the device does.
    """

    data: list[tuple[float, float]] = field(default_factory=list)
    peers: list[tuple[float, float]] | None = None


def run_instructions(
    instructions: Sequence[Instruction], works: Mapping[int, StageWork], links: Links, waits: Waits | None = None
) -> list[Span]:
    """Carry out one step's instructions of a rank, with the work of each of its nodes in `works`.

    Returns the computations with their times. The times at which the host waited are added to `waits`.
    """
    step = _Step(works, links, waits or Waits())
    for item in instructions:
        _CARRY_OUT[item.op](step, item)
    return step.end()


class _Step:
    """The state of a step: tensors by (is forward, node, microbatch) and edge, and sends that are under way."""

    def __init__(self, works: Mapping[int, StageWork], links: Links, waits: Waits) -> None:
        self._works, self._links, self._clock, self._waits = works, links, _Clock(links.device), waits
        if links.device.type == "cpu":
            waits.peers = []
        self._received: dict[tuple[bool, int, int], dict[int, torch.Tensor]] = {}
        self._made: dict[tuple[bool, int, int], dict[int, torch.Tensor]] = {}
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []

    def forward(self, item: Instruction) -> None:
        work = self._works[item.node]
        with _noted(self._waits.data):
            work.prepare(item.microbatch)
        received = self._received.pop((True, item.node, item.microbatch), {})
        with self._clock.span(item):
            made = work.forward(item.microbatch, received)
        self._pass_on(item, made)

    def backward(self, item: Instruction) -> None:
        received = self._received.pop((False, item.node, item.microbatch), {})
        with self._clock.span(item):
            made = self._works[item.node].backward(item.microbatch, received)
        self._pass_on(item, made)

    def sync_gradients(self, item: Instruction) -> None:
        with self._clock.span(item):
            self._works[item.node].sync_gradients()

    def send(self, item: Instruction) -> None:
        wires = self._links.sends.get((item.edge, item.op.is_forward))
        shape = self._works[item.node].edge_shape(item.microbatch, item.edge)
        if wires is None or shape is None:
            return
        made = self._made[item.op.is_forward, item.node, item.microbatch]
        tensor = made.pop(item.edge).to(self._links.dtype).contiguous()
        assert tuple(tensor.shape) == shape, f"edge {item.edge}: made {tuple(tensor.shape)}, scheduled {shape}"
        self._sends = [send for send in self._sends if not send[0].is_completed()]  # lets go of what has arrived
        for peer, group in wires:
            self._sends.append((dist.isend(tensor, dst=peer, group=group), tensor))

    def receive(self, item: Instruction) -> None:
        shape = self._works[item.node].edge_shape(item.microbatch, item.edge)
        if shape is None:
            return
        peer, group = self._links.receives[item.edge, item.op.is_forward]
        tensor = torch.empty(shape, dtype=self._links.dtype, device=self._links.device)
        arriving = dist.irecv(tensor, src=peer, group=group)
        with _noted(self._waits.peers):
            arriving.wait()
        self._received.setdefault((item.op.is_forward, item.node, item.microbatch), {})[item.edge] = tensor

    def end(self) -> list[Span]:
        with _noted(self._waits.peers):
            for handle, _ in self._sends:
                handle.wait()
        return self._clock.spans()

    def _pass_on(self, item: Instruction, made: dict[int, torch.Tensor]) -> None:
        """Hand over the tensors that other nodes of this rank take, and keep those that are sent until their send."""
        forward = item.op is Op.FORWARD
        for number, tensor in made.items():
            if number in self._links.inner:
                edge = self._links.edges[number]
                taker = (forward, edge.target if forward else edge.source, item.microbatch)
                as_sent = tensor.to(self._links.dtype) if (number, forward) in self._links.shared else tensor
                self._received.setdefault(taker, {})[number] = as_sent
            if (number, forward) in self._links.sends:
                self._made.setdefault((forward, item.node, item.microbatch), {})[number] = tensor


_CARRY_OUT = {
    Op.FORWARD: _Step.forward,
    Op.BACKWARD: _Step.backward,
    Op.SYNC_GRADIENTS: _Step.sync_gradients,
    Op.SEND_FORWARD: _Step.send,
    Op.SEND_BACKWARD: _Step.send,
    Op.RECV_FORWARD: _Step.receive,
    Op.RECV_BACKWARD: _Step.receive,
}


@contextmanager
def _noted(waits: list[tuple[float, float]] | None):
    started = time.monotonic()
    yield
    if waits is not None:
        waits.append((started, time.monotonic()))


class _Clock:
    """Spans of computations: by the host's clock on CPUs, by CUDA events on GPUs, where kernels run asynchronously."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._entries: list[tuple[Instruction, object, object]] = []
        if self._is_cuda:
            # Not the whole device: updated parameters may still come in while the first forward computes.
            torch.cuda.current_stream(device).synchronize()
            self._zero_event = torch.cuda.Event(enable_timing=True)
            self._zero_event.record()
        self._zero_s = time.monotonic()

    @contextmanager
    def span(self, item: Instruction):
        start = self._mark()
        yield
        self._entries.append((item, start, self._mark()))

    def spans(self) -> list[Span]:
        if self._is_cuda:
            torch.cuda.synchronize()
        return [
            Span(item.op, item.node, item.microbatch, self._seconds(start), self._seconds(end))
            for item, start, end in self._entries
        ]

    def _mark(self) -> object:
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: object) -> float:
        if isinstance(mark, float):
            return mark
        return self._zero_s + self._zero_event.elapsed_time(mark) / 1000
