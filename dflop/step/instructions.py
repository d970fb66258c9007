"""The instruction list: what every worker does in one step, in which order, transfers included.

The list is a pure function of the plan. The trainer executes it; the simulator prices the same orders, without
making an object of every instruction. Nodes and workers are numbered as in `nodes`. An edge joins a node to
another that takes its output, inside a module or over the bridge between two modules. The shape of what travels over
an edge is known from the schedule, so a list holds no sizes. Both ends skip an edge without data for a microbatch, and
a worker that carries both ends transfers nothing.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dflop.plan.passes import FORWARD
from dflop.plan.plan import Plan
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.step.nodes import Node, StageReplicas, Worker, nodes_of, stages_of, workers_of
from dflop.step.orders import group_orders
from dflop.step.routes import Edge, edges_of, make_routes

__all__ = ["Instruction", "Op", "Program", "Span", "StepInstructions", "make_program"]


class Op(StrEnum):
    """The kinds of instructions, by the letters of torch's pipeline schedules where torch has one."""

    RECV_FORWARD = "RECV_F"
    FORWARD = "F"
    SEND_FORWARD = "SEND_F"
    RECV_BACKWARD = "RECV_B"
    BACKWARD = "B"
    SEND_BACKWARD = "SEND_B"
    SYNC_GRADIENTS = "SYNC"

    @property
    def is_forward(self) -> bool:
        """Whether the instruction belongs to the forward pass."""
        return self in (Op.RECV_FORWARD, Op.FORWARD, Op.SEND_FORWARD)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action of a node; `microbatch` is -1 for the gradient sync, `edge` the index of the edge for transfers."""

    op: Op
    node: int
    microbatch: int = -1
    edge: int = -1

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
    instructions: tuple[tuple[Instruction, ...], ...]


def make_program(plan: Plan, trained: TrainedSet = EVERYTHING, slots: np.ndarray | None = None) -> Program:
    """The program of a plan. Frozen encoders (see `trained`) have no backward.

    `slots` are those of `group_orders`.
    """
    stages, nodes, workers, edges = stages_of(plan), nodes_of(plan), workers_of(plan), edges_of(plan)
    writer = _Writer(plan, nodes, workers, edges, trained)
    # The workers of a group have consecutive indices.
    lists: list[tuple[Instruction, ...]] = [()] * len(workers)
    for group, order in enumerate(group_orders(plan, trained, slots)):
        for worker in _workers_of_group(stages, group):
            lists[worker] = writer.list_of(worker, order)
    return Program(
        nodes=nodes,
        workers=workers,
        edges=edges,
        num_microbatches=plan.num_microbatches,
        num_shards={grid.module: grid.num_shards for grid in plan.grids},
        instructions=tuple(lists),
    )


class StepInstructions:
    """One rank's instructions for each step: those of the program, or those of a batch that has slots of its own."""

    def __init__(self, plan: Plan, program: Program, trained: TrainedSet, rank: int) -> None:
        self._plan, self._trained = plan, trained
        self._worker = next(
            index for index, own in enumerate(program.workers) if 0 <= rank - own.first_rank < own.num_ranks
        )
        self._usual = program.instructions[self._worker]
        self._writer = _Writer(plan, program.nodes, program.workers, program.edges, trained)
        stages = stages_of(plan)
        groups = {stage.group for stage in stages if stage.num_groups == 1}
        self._group = next(group for group in groups if self._worker in _workers_of_group(stages, group))

    def of(self, slots: np.ndarray | None) -> tuple[Instruction, ...]:
        """The instructions for a batch with these slots (see `group_orders`); None for the program's own."""
        if slots is None:
            return self._usual
        return self._writer.list_of(self._worker, group_orders(self._plan, self._trained, slots)[self._group])


class _Writer:
    """Turns orders of computations into instructions, with the transfers before and after each computation."""

    def __init__(
        self,
        plan: Plan,
        nodes: Sequence[Node],
        workers: Sequence[Worker],
        edges: Sequence[Edge],
        trained: TrainedSet,
    ) -> None:
        self._stages, self._workers = stages_of(plan), workers
        self._transfers = _transfers(nodes, workers, edges, trained)

    def list_of(self, worker: int, order: np.ndarray) -> tuple[Instruction, ...]:
        """A worker's list, given its group's order."""
        listed: list[Instruction] = []
        for pass_, place, microbatch in order.tolist():
            stage = self._stages[place]
            node = stage.first_node + (worker - stage.first_worker) // stage.span
            if pass_ == FORWARD:
                before, op, behind = Op.RECV_FORWARD, Op.FORWARD, Op.SEND_FORWARD
            else:
                before, op, behind = Op.RECV_BACKWARD, Op.BACKWARD, Op.SEND_BACKWARD
            listed += (Instruction(before, node, microbatch, edge) for edge in self._transfers[before, worker, node])
            listed.append(Instruction(op, node, microbatch))
            listed += (Instruction(behind, node, microbatch, edge) for edge in self._transfers[behind, worker, node])
        return (*listed, *(Instruction(Op.SYNC_GRADIENTS, node) for node in self._workers[worker].nodes))


def _transfers(
    nodes: Sequence[Node], workers: Sequence[Worker], edges: Sequence[Edge], trained: TrainedSet
) -> dict[tuple[Op, int, int], dict[int, None]]:
    """The edges that a worker receives or sends over for one of its nodes, by operation, worker and node, in order."""
    routes = make_routes(workers, edges)
    found: dict[tuple[Op, int, int], dict[int, None]] = defaultdict(dict)
    for number, edge in enumerate(edges):
        for route in routes.of(number, True):
            found[Op.SEND_FORWARD, route.sender, edge.source][number] = None
            found[Op.RECV_FORWARD, route.receiver, edge.target][number] = None
        # A frozen encoder computes no gradient, so neither end of its bridge moves one.
        for route in routes.of(number, False) if trained.has_backward(nodes[edge.source].module) else ():
            found[Op.SEND_BACKWARD, route.sender, edge.target][number] = None
            found[Op.RECV_BACKWARD, route.receiver, edge.source][number] = None
    return found


def _workers_of_group(stages: tuple[StageReplicas, ...], group: int) -> range:
    stage = next(stage for stage in reversed(stages) if stage.group == group and stage.num_groups == 1)
    return range(stage.first_worker, stage.first_worker + stage.dp * stage.span)
