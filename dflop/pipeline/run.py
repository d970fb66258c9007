"""The executor: one rank's instructions, carried out with torch and a process group.

Sizes of everything received are known from the schedule; nothing is exchanged to learn them. Sends are
asynchronous; forward and backward traffic use a process group each, since NCCL has no tags: it carries out a
rank's messages of one group one after the other, so the two ends of an edge must post them in the same order.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from dflop.pipeline.instructions import Edge, Instruction, Op, Span

__all__ = ["Links", "StageWork", "run_instructions"]


class StageWork(Protocol):
    """What a node computes. Tensors come and go by edge; an edge without data is left out of the dicts."""

    def edge_shape(self, microbatch: int, edge: int) -> tuple[int, ...] | None:
        """Shape of what travels over an edge, the same in both directions; None where nothing does."""

    def prepare(self, microbatch: int) -> None:
        """Have the microbatch's own inputs at hand; waiting for them is not part of the computation."""

    def forward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compute, and return what to send over each outgoing edge."""

    def backward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Take the gradients of what was sent; return those of what was received."""

    def sync_gradients(self) -> None:
        """Sum the gradients over the node's replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """How edges map to the world: the rank of each node, and a process group a direction."""

    rank_of_node: tuple[int, ...]
    edges: tuple[Edge, ...]
    forward_group: dist.ProcessGroup | None
    backward_group: dist.ProcessGroup | None
    device: torch.device
    dtype: torch.dtype


def run_instructions(instructions: Sequence[Instruction], work: StageWork, links: Links) -> list[Span]:
    """Carry out one step's instructions, all of one node; returns the computations with their times."""
    clock = _Clock(links.device)
    received: dict[tuple[Op, int], dict[int, torch.Tensor]] = {}
    made: dict[tuple[Op, int], dict[int, torch.Tensor]] = {}
    sends: list[tuple[dist.Work, torch.Tensor]] = []
    for item in instructions:
        if item.op in (Op.FORWARD, Op.BACKWARD):
            compute = work.forward if item.op is Op.FORWARD else work.backward
            if item.op is Op.FORWARD:
                work.prepare(item.microbatch)
            with clock.span(item):
                made[item.op, item.microbatch] = compute(item.microbatch, received.pop((item.op, item.microbatch), {}))
        elif item.op is Op.SYNC_GRADIENTS:
            with clock.span(item):
                work.sync_gradients()
        else:
            _transfer(item, work, links, received, made, sends)
    for handle, _ in sends:
        handle.wait()
    return clock.spans()


def _transfer(
    item: Instruction,
    work: StageWork,
    links: Links,
    received: dict[tuple[Op, int], dict[int, torch.Tensor]],
    made: dict[tuple[Op, int], dict[int, torch.Tensor]],
    sends: list[tuple[dist.Work, torch.Tensor]],
) -> None:
    shape = work.edge_shape(item.microbatch, item.edge)
    if shape is None:
        return
    edge = links.edges[item.edge]
    is_forward = item.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
    group = links.forward_group if is_forward else links.backward_group
    direction = Op.FORWARD if is_forward else Op.BACKWARD
    if item.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
        peer = links.rank_of_node[edge.target if is_forward else edge.source]
        tensor = made[direction, item.microbatch].pop(item.edge).to(links.dtype).contiguous()
        assert tuple(tensor.shape) == shape, f"edge {item.edge}: made {tuple(tensor.shape)}, scheduled {shape}"
        sends[:] = [send for send in sends if not send[0].is_completed()]  # lets go of what has arrived
        sends.append((dist.isend(tensor, dst=peer, group=group), tensor))
    else:
        peer = links.rank_of_node[edge.source if is_forward else edge.target]
        tensor = torch.empty(shape, dtype=links.dtype, device=links.device)
        dist.irecv(tensor, src=peer, group=group).wait()
        received.setdefault((direction, item.microbatch), {})[item.edge] = tensor


class _Clock:
    """Spans of computations: by the host's clock on CPUs, by CUDA events where kernels run behind the host."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._entries: list[tuple[Instruction, object, object]] = []
        if self._is_cuda:
            torch.cuda.synchronize(device)
            self._zero_event = torch.cuda.Event(enable_timing=True)
            self._zero_event.record()
        self._zero_s = time.monotonic()

    def span(self, item: Instruction) -> "_OpenSpan":
        return _OpenSpan(self, item)

    def mark(self) -> object:
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, item: Instruction, start: object, end: object) -> None:
        self._entries.append((item, start, end))

    def spans(self) -> list[Span]:
        if self._is_cuda:
            torch.cuda.synchronize()
        return [
            Span(item.op, item.microbatch, self._seconds(start), self._seconds(end))
            for item, start, end in self._entries
        ]

    def _seconds(self, mark: object) -> float:
        if isinstance(mark, float):
            return mark
        return self._zero_s + self._zero_event.elapsed_time(mark) / 1000


class _OpenSpan:
    def __init__(self, clock: _Clock, item: Instruction) -> None:
        self._clock, self._item = clock, item

    def __enter__(self) -> None:
        self._start = self._clock.mark()

    def __exit__(self, *error: object) -> None:
        self._clock.add(self._item, self._start, self._clock.mark())
