"""The executor: one rank's instructions of a step, carried out with torch and process groups.

The rank may carry several nodes: each has a `StageWork` that computes for it. Sizes of everything received are known
from the schedule, so nothing is exchanged to learn them. Messages are sent and received behind the computations of the
host: those of one place in the total order and one channel together, as one operation. Received tensors come while the
rank computes, and a computation waits only for those that it takes. What was sent is kept for some further
computations (`instructions.kept_until`). A tensor from one node to another of the same rank is handed over without a
copy. The ranks of a worker carry out the same instructions, each with wires of its own.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from dflop.step.instructions import Instruction, Kept, Op, Span, instructions_together
from dflop.step.receiving import Receiver
from dflop.step.routes import Edge

__all__ = ["Links", "StageWork", "Waits", "Wire", "run_instructions"]


class StageWork(Protocol):
    """The computations of one node. Mappings hold a tensor by its edge's index, and leave out edges without data."""

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
    """The rank at the other end, and the channel that messages between the two take, with its process group."""

    peer: int
    channel: int
    group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """One rank's ends of a program's edges.

    `sends` and `receives` are keyed by (edge, is forward): over an edge a rank sends to any number of others, and
    receives from one. `inner` are the edges of which the rank carries both ends. `shared` are those over which other
    ranks of the receiving node get messages; all ranks of this node must take the same values, so the tensor that is
    handed over inside this rank is rounded as a message is. `receiver` has the memory for what is received.
    """

    edges: tuple[Edge, ...]
    sends: Mapping[tuple[int, bool], tuple[Wire, ...]]
    receives: Mapping[tuple[int, bool], Wire]
    inner: Collection[int]
    shared: Collection[tuple[int, bool]]
    device: torch.device
    dtype: torch.dtype
    receiver: Receiver


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
    step = _Step(works, links, waits or Waits(), Kept(instructions, links.edges))
    for is_message, items in instructions_together(instructions):
        if is_message:
            step.exchange(items)
        else:
            for item in items:
                _CARRY_OUT[item.op](step, item)
    return step.end()


class _Step:
    """The state of a step: tensors by (is forward, node, microbatch) and edge, and sends that are under way."""

    def __init__(self, works: Mapping[int, StageWork], links: Links, waits: Waits, kept: Kept) -> None:
        self._works, self._links, self._clock, self._waits = works, links, _Clock(links.device), waits
        self._kept = kept
        if links.device.type == "cpu":
            waits.peers = []
        self._received: dict[tuple[bool, int, int], dict[int, torch.Tensor]] = {}
        self._made: dict[tuple[bool, int, int], dict[int, _Made]] = {}
        self._arriving: dict[tuple[bool, int, int], dict[int, _UnderWay]] = {}
        self._sending: list[tuple[Instruction, _UnderWay]] = []

    def forward(self, item: Instruction) -> None:
        work = self._works[item.node]
        with _noted(self._waits.data):
            work.prepare(item.microbatch)
        received = self._received.pop((True, item.node, item.microbatch), {})
        with self._clock.span(item):
            made = work.forward(item.microbatch, received)
        self._let_go(item)
        self._pass_on(item, made)

    def backward(self, item: Instruction) -> None:
        received = self._received.pop((False, item.node, item.microbatch), {})
        with self._clock.span(item):
            made = self._works[item.node].backward(item.microbatch, received)
        self._let_go(item)
        self._pass_on(item, made)

    def sync_gradients(self, item: Instruction) -> None:
        with self._clock.span(item):
            self._works[item.node].sync_gradients()

    def exchange(self, items: Iterable[Instruction]) -> None:
        """Begin to send and receive: what takes the same channel is one operation."""
        by_channel: dict[int, _Exchange] = defaultdict(_Exchange)
        for item in items:
            if (shape := self._works[item.node].edge_shape(item.microbatch, item.edge)) is None:
                continue
            end = item.edge, item.op.is_forward
            if item.op.is_send:
                if end not in self._links.sends:
                    continue  # another rank of this worker sends it
                made = self._made[item.op.is_forward, item.node, item.microbatch].pop(item.edge)
                made_shape = tuple(made.tensor.shape)
                assert made_shape == shape, f"edge {item.edge}: made {made_shape}, scheduled {shape}"
                for wire in self._links.sends[end]:
                    by_channel[wire.channel].sends.append((item, made, wire))
            else:
                wire = self._links.receives[end]
                by_channel[wire.channel].receives.append((item, shape, wire))
        for channel in sorted(by_channel):
            sending, arriving = by_channel[channel].begin(channel, self._links.receiver)
            self._sending += sending
            for item, message in arriving:
                self._arriving.setdefault((item.op.is_forward, item.node, item.microbatch), {})[item.edge] = message

    def wait(self, item: Instruction) -> None:
        key = item.op.is_forward, item.node, item.microbatch
        if (arriving := self._arriving.get(key, {}).pop(item.edge, None)) is None:
            return  # there is no data
        with _noted(self._waits.peers):
            arriving.work.wait()
        self._received.setdefault(key, {})[item.edge] = self._links.receiver.take(arriving.tensor)

    def end(self) -> list[Span]:
        with _noted(self._waits.peers):
            for _, sent in self._sending:
                sent.work.wait()
        return self._clock.spans()

    def _let_go(self, computed: Instruction) -> None:
        """Free the memory of what need not be kept behind the last computation."""
        self._kept.compute(computed)
        self._sending = [
            (item, sent)
            for item, sent in self._sending
            if self._kept.has(item) or not self._links.receiver.lets_go(sent.work)
        ]

    def _pass_on(self, item: Instruction, made: dict[int, torch.Tensor]) -> None:
        """Hand over the tensors that other nodes of this rank take, and keep those that are sent until their send."""
        forward, sent = item.op is Op.FORWARD, {}
        for number, tensor in made.items():
            if number in self._links.inner:
                edge = self._links.edges[number]
                taker = (forward, edge.target if forward else edge.source, item.microbatch)
                as_sent = tensor.to(self._links.dtype) if (number, forward) in self._links.shared else tensor
                self._received.setdefault(taker, {})[number] = as_sent
            if (number, forward) in self._links.sends:
                sent[number] = tensor.to(self._links.dtype).contiguous()
        if sent:
            at = self._links.receiver.made()
            made_here = self._made.setdefault((forward, item.node, item.microbatch), {})
            made_here |= {number: _Made(tensor, at) for number, tensor in sent.items()}


_CARRY_OUT = {
    Op.FORWARD: _Step.forward,
    Op.BACKWARD: _Step.backward,
    Op.SYNC_GRADIENTS: _Step.sync_gradients,
    Op.WAIT_FORWARD: _Step.wait,
    Op.WAIT_BACKWARD: _Step.wait,
}


class _Made(NamedTuple):
    """A tensor that is to be sent, and on a GPU the event behind which it is there."""

    tensor: torch.Tensor
    at: torch.cuda.Event | None


class _Exchange:
    """Sends and receives that are begun together, over one channel."""

    def __init__(self) -> None:
        self.sends: list[tuple[Instruction, _Made, Wire]] = []
        self.receives: list[tuple[Instruction, tuple[int, ...], Wire]] = []

    def begin(
        self, channel: int, receiver: Receiver
    ) -> tuple[list[tuple[Instruction, "_UnderWay"]], list[tuple[Instruction, "_UnderWay"]]]:
        """Begin all of it; returns the sends and the receives with their instructions."""
        operations = [dist.P2POp(dist.isend, made.tensor, wire.peer, wire.group) for _, made, wire in self.sends]
        buffers = receiver.buffers(channel, [shape for _, shape, _ in self.receives]) if self.receives else []
        for buffer, (_, _, wire) in zip(buffers, self.receives, strict=True):
            operations.append(dist.P2POp(dist.irecv, buffer, wire.peer, wire.group))
        with receiver.issuing(channel, [made.at for _, made, _ in self.sends]):
            works = dist.batch_isend_irecv(operations)
        under_way = [_UnderWay(operation.tensor, works, number) for number, operation in enumerate(operations)]
        begun = [(item, its) for (item, *_), its in zip([*self.sends, *self.receives], under_way, strict=True)]
        return begun[: len(self.sends)], begun[len(self.sends) :]


class _UnderWay(NamedTuple):
    """A tensor that an operation of an exchange sends or receives.

    With gloo each operation has its own work, for which one may wait once; with NCCL the exchange has one.
    """

    tensor: torch.Tensor
    works: list[dist.Work]
    number: int

    @property
    def work(self) -> dist.Work:
        return self.works[self.number] if len(self.works) > 1 else self.works[0]


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
