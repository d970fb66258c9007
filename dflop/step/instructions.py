"""The instruction list: what every worker does in one step, in which order, messages included.

The list is a pure function of the plan. The trainer executes it; the simulator prices the same orders, without
making an object of every instruction. Nodes and workers are numbered as in `nodes`. An edge joins a node to
another that takes its output, inside a module or over the bridge between two modules. The shape of what travels over
an edge is known from the schedule, so a list holds no sizes. Both ends skip an edge without data for a microbatch, and
a worker that carries both ends transfers nothing.

Nothing can wait in a circle. In the total order of all computations (`compiled`), a message stands right behind the
computation that makes it, and the messages of one computation stand in the order of their edges. Features stand behind
the LLM's forward of a few microbatches before, so that few of them wait at their receivers. A worker issues all that it
does in this order: a send behind its computation, and a receive at the same place, long before the worker's computation
that waits for it. Of all that is not done, take the first in the total
order: it has all that it waits for, and it is the next to be done on each worker that takes part, even if all of the
worker's streams share one queue.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from dflop.plan.passes import BACKWARD, FORWARD
from dflop.plan.plan import Plan
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.step.compiled import AHEAD, compile_plan
from dflop.step.nodes import Node, Worker, nodes_of, worker_of, workers_of
from dflop.step.routes import Edge, Route, edges_of, make_routes
from dflop.step.simulation_kernel import BRIDGE_IN, DP, PARTS

__all__ = [
    "Instruction",
    "Kept",
    "Op",
    "Program",
    "Span",
    "StepInstructions",
    "features_issued_at",
    "instructions_together",
    "kept_until",
    "make_program",
]


class Op(StrEnum):
    """The kinds of instructions, by the letters of torch's pipeline schedules where torch has one."""

    FORWARD = "F"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    WAIT_FORWARD = "WAIT_F"
    BACKWARD = "B"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    WAIT_BACKWARD = "WAIT_B"
    SYNC_GRADIENTS = "SYNC"

    @property
    def is_forward(self) -> bool:
        """Whether the instruction belongs to the forward pass."""
        return self in (Op.FORWARD, Op.SEND_FORWARD, Op.RECV_FORWARD, Op.WAIT_FORWARD)

    @property
    def is_send(self) -> bool:
        return self in (Op.SEND_FORWARD, Op.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        """Whether the instruction begins to receive a message."""
        return self in (Op.RECV_FORWARD, Op.RECV_BACKWARD)

    @property
    def is_wait(self) -> bool:
        """Whether the instruction waits for the end of a receive."""
        return self in (Op.WAIT_FORWARD, Op.WAIT_BACKWARD)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action of a node; `microbatch` is -1 for the gradient sync, `edge` the index of the edge for messages.

    `place` is that of the computation in the total order; for a send or a receive that of the computation behind which
    the message stands, and for a wait that of the computation that takes it. Sends and receives of one place and
    channel are issued together.
    """

    op: Op
    node: int
    microbatch: int = -1
    edge: int = -1
    place: int = -1

    def __str__(self) -> str:
        where = f"@{self.edge}" if self.edge >= 0 else ""
        return f"{self.node}{self.op}{self.microbatch if self.microbatch >= 0 else ''}{where}"


@dataclass(frozen=True, slots=True)
class Span:
    """An instruction that was carried out; times are seconds on the host's monotonic clock."""

    op: Op
    node: int
    microbatch: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Every worker's instructions for one step, and the nodes and edges that the instructions refer to by index.

    A node that several workers carry stands in the lists of all of them: they compute together, and each receives and
    sends for itself.
    """

    nodes: tuple[Node, ...]
    workers: tuple[Worker, ...]
    edges: tuple[Edge, ...]
    num_microbatches: int
    # Among how many replicas each module's parameters are divided.
    num_shards: Mapping[str, int]
    # Up to how many replicas compute a sample together, by module.
    cp: Mapping[str, int]
    instructions: tuple[tuple[Instruction, ...], ...]


def make_program(
    plan: Plan, trained: TrainedSet = EVERYTHING, slots: np.ndarray | None = None, *, rank: int | None = None
) -> Program:
    """The program of a plan. Frozen encoders (see `trained`) have no backward.

    `slots` are those of `group_orders`. With `rank`, only the worker of this rank has a list, and others an empty one:
    a thousand ranks need not make each other's.
    """
    writer = _Writer(plan, trained, rank)
    order = compile_plan(plan, trained, slots).order.tolist()
    return Program(
        nodes=writer.nodes,
        workers=writer.workers,
        edges=writer.edges,
        num_microbatches=plan.num_microbatches,
        num_shards={grid.module: grid.num_shards for grid in plan.grids},
        cp={grid.module: grid.cp for grid in plan.grids},
        instructions=tuple(writer.list_of(worker, order) for worker in range(len(writer.workers))),
    )


class StepInstructions:
    """One rank's instructions for each step: those of the program, or those of a batch that has slots of its own."""

    def __init__(self, plan: Plan, program: Program, trained: TrainedSet, rank: int) -> None:
        self._plan, self._trained, self._rank = plan, trained, rank
        self._worker = worker_of(program.workers, rank)
        self._usual = program.instructions[self._worker]

    @cached_property
    def _writer(self) -> "_Writer":
        return _Writer(self._plan, self._trained, self._rank)

    def of(self, slots: np.ndarray | None) -> tuple[Instruction, ...]:
        """The instructions for a batch with these slots (see `group_orders`); None for the program's own."""
        if slots is None:
            return self._usual
        return self._writer.list_of(self._worker, compile_plan(self._plan, self._trained, slots).order.tolist())


def instructions_together(instructions: Iterable[Instruction]) -> Iterator[tuple[bool, Iterator[Instruction]]]:
    """A worker's instructions in groups: whether a group is of sends and receives, which are issued together, and its
    instructions."""
    grouped = groupby(instructions, lambda item: (item.op.is_send or item.op.is_receive, item.place))
    return ((is_message, items) for (is_message, _), items in grouped)


def features_issued_at(order: Sequence[Sequence[int]], takes_features: Sequence[bool]) -> dict[int, int]:
    """By microbatch, the place in the total order before which its features are not sent, so that they do not pile up
    at their receivers: behind the forward of the microbatch `AHEAD` before on the stage that takes features."""
    return {
        microbatch + AHEAD: place
        for place, (which, stage, microbatch, _) in enumerate(order)
        if which == FORWARD and takes_features[stage]
    }


def kept_until(send: Instruction, edge: Edge, learns: bool) -> tuple[Op, int, int]:
    """The computation (kind, node, microbatch) behind which what is sent over an edge need not be kept any more.

    For features and hidden states this is the node's backward of the microbatch or, if it has none (`learns` is False),
    its forward `AHEAD` microbatches behind. For a gradient it is the node's next backward or, for that of features, the
    backward `AHEAD` microbatches behind: all replicas send these to all ranks of encoders, so that each would wait for
    the slowest.
    """
    if send.op.is_forward and learns:
        return Op.BACKWARD, send.node, send.microbatch
    op = Op.FORWARD if send.op.is_forward else Op.BACKWARD
    return op, send.node, send.microbatch + (AHEAD if send.op.is_forward or edge.is_bridge else 1)


class Kept:
    """What a rank has sent and still keeps, while it goes through its instructions of a step."""

    def __init__(self, instructions: Iterable[Instruction], edges: Sequence[Edge]) -> None:
        self._learning = {item.node for item in instructions if item.op is Op.BACKWARD}
        self._edges, self._computed = edges, set[tuple[Op, int, int]]()

    def compute(self, item: Instruction) -> None:
        """Note that this was computed."""
        self._computed.add((item.op, item.node, item.microbatch))

    def has(self, send: Instruction) -> bool:
        """Whether what was sent is kept behind the last computation, too."""
        return kept_until(send, self._edges[send.edge], send.node in self._learning) not in self._computed


class _Message(NamedTuple):
    """A worker's end of a message over an edge: the node that it carries there, and whether it sends."""

    edge: int
    node: int
    is_send: bool


class _Writer:
    """Turns the total order into the instructions of all workers, or of one rank's."""

    def __init__(self, plan: Plan, trained: TrainedSet, rank: int | None = None) -> None:
        self.nodes, self.workers, self.edges = nodes_of(plan), workers_of(plan), edges_of(plan)
        self._only = None if rank is None else worker_of(self.workers, rank)
        stages = compile_plan(plan, trained).stages.tolist()
        # The stage of each node, and the part of the stage's replicas that the node belongs to.
        self._stage_and_part = [
            (place, replica * stage[PARTS] // stage[DP])
            for place, stage in enumerate(stages)
            for replica in range(stage[DP])
        ]
        self._takes_features = [stage[BRIDGE_IN] > 0 for stage in stages]
        # What a worker sends and receives when a part of a stage computes; what it waits for before its node computes.
        self._messages: dict[tuple[int, int, tuple[int, int]], list[_Message]] = defaultdict(list)
        self._awaited: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        routes = make_routes(self.workers, self.edges)
        for number, edge in enumerate(self.edges):
            self._add(FORWARD, number, edge.source, edge.target, routes.of(number, True))
            # A frozen encoder computes no gradient, so neither end of its bridge moves one.
            if trained.has_backward(self.nodes[edge.source]):
                self._add(BACKWARD, number, edge.target, edge.source, routes.of(number, False))

    def _add(self, which: int, edge: int, maker: int, taker: int, routes: Sequence[Route]) -> None:
        making = self._stage_and_part[maker]
        for sender in dict.fromkeys(route.sender for route in routes):
            if self._only in (None, sender):
                self._messages[sender, which, making].append(_Message(edge, maker, True))
        for _, receiver in routes:
            if self._only in (None, receiver):
                self._messages[receiver, which, making].append(_Message(edge, taker, False))
                self._awaited[receiver, which, taker].append(edge)

    def list_of(self, worker: int, order: Sequence[Sequence[int]]) -> tuple[Instruction, ...]:
        """A worker's list, given the total order [num_computations, 4] (`CompiledPlan.order`)."""
        if self._only not in (None, worker):
            return ()
        carried = {self._stage_and_part[node]: node for node in self.workers[worker].nodes}
        issued_at = features_issued_at(order, self._takes_features)
        waiting: dict[int, list[Instruction]] = defaultdict(list)  # by the place where they are issued
        listed: list[Instruction] = []
        for place, (which, stage, microbatch, part) in enumerate(order):
            compute, send, receive, wait = _OPS[which]
            if (node := carried.get((stage, part))) is not None:
                awaited = self._awaited[worker, which, node]
                listed += (Instruction(wait, node, microbatch, edge, place) for edge in awaited)
                listed.append(Instruction(compute, node, microbatch, place=place))
            for message in self._messages[worker, which, (stage, part)]:
                is_bridged = which == FORWARD and self.edges[message.edge].is_bridge
                at = max(place, issued_at.get(microbatch, place)) if is_bridged else place
                op = send if message.is_send else receive
                waiting[at].append(Instruction(op, message.node, microbatch, message.edge, at))
            listed += waiting.pop(place, [])
        return (*listed, *(Instruction(Op.SYNC_GRADIENTS, node) for node in self.workers[worker].nodes))


_OPS = {
    FORWARD: (Op.FORWARD, Op.SEND_FORWARD, Op.RECV_FORWARD, Op.WAIT_FORWARD),
    BACKWARD: (Op.BACKWARD, Op.SEND_BACKWARD, Op.RECV_BACKWARD, Op.WAIT_BACKWARD),
}
