"""The instruction list: what every worker does in one step, in which order, transfers included.

A pure function of the plan. The trainer executes the list; the simulator prices the same orders, without
making an object of every instruction. Nodes and workers are numbered as in `layout`; an edge joins a node to
one that consumes what it makes, inside a module or over the bridge between two modules. What travels over an
edge is known from the schedule, so a list holds no sizes; an edge without data for a microbatch is skipped by
both ends, and one between nodes that share ranks needs no transfer.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from dflop.parallelism.passes import BACKWARD, FORWARD
from dflop.parallelism.placements import PLACEMENTS
from dflop.parallelism.plan import Plan
from dflop.pipeline.layout import Node, StageReplicas, Worker, nodes_of, stages_of, workers_of
from dflop.pipeline.orders import group_orders, has_backward, splits_backward

__all__ = ["Edge", "Instruction", "Op", "Program", "Span", "make_program"]


class Op(StrEnum):
    """Letters as in torch's pipeline schedules, where it has one."""

    RECV_FORWARD = "RECV_F"
    FORWARD = "F"
    SEND_FORWARD = "SEND_F"
    RECV_BACKWARD = "RECV_B"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_BACKWARD = "SEND_B"
    SYNC_GRADIENTS = "SYNC"

    @property
    def is_forward(self) -> bool:
        """Whether it belongs to the forward pass."""
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


@dataclass(frozen=True, slots=True)
class Edge:
    """Data flows from node `source` to node `target` going forward, back again going backward."""

    source: int
    target: int
    is_bridge: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Every worker's instructions for one step, and the nodes and edges they speak of.

    A node that several workers carry stands in the lists of all of them.
    """

    nodes: tuple[Node, ...]
    workers: tuple[Worker, ...]
    edges: tuple[Edge, ...]
    num_microbatches: int
    instructions: tuple[tuple[Instruction, ...], ...]


def make_program(plan: Plan, frozen: Collection[str] = ()) -> Program:
    """The program of a plan. Modules in `frozen` compute no gradients, and encoders among them no backward."""
    stages, nodes, workers = stages_of(plan), nodes_of(plan), workers_of(plan)
    edges = _edges(plan, stages)
    carriers: list[set[int]] = [set() for _ in nodes]
    for index, worker in enumerate(workers):
        for node in worker.nodes:
            carriers[node].add(index)
    inputs: list[list[int]] = [[] for _ in nodes]
    outputs: list[list[int]] = [[] for _ in nodes]
    for number, edge in enumerate(edges):
        if not carriers[edge.source] & carriers[edge.target]:
            inputs[edge.target].append(number)
            outputs[edge.source].append(number)
    # A frozen encoder computes no gradient, so neither end of its bridge moves one.
    owed = [[edge for edge in own if has_backward(nodes[edges[edge].source].module, frozen)] for own in inputs]
    # The workers of a group follow each other, one run of workers a group.
    lists: list[tuple[Instruction, ...]] = [()] * len(workers)
    for group, order in enumerate(group_orders(plan, frozen)):
        for worker in _workers_of_group(stages, group):
            listed: list[Instruction] = []
            for pass_, place, microbatch in order.tolist():
                stage = stages[place]
                node = stage.first_node + (worker - stage.first_worker) // stage.span
                if pass_ == FORWARD:
                    listed += (Instruction(Op.RECV_FORWARD, node, microbatch, edge) for edge in inputs[node])
                    listed.append(Instruction(Op.FORWARD, node, microbatch))
                    listed += (Instruction(Op.SEND_FORWARD, node, microbatch, edge) for edge in outputs[node])
                elif pass_ == BACKWARD:
                    op = Op.BACKWARD_INPUT if splits_backward(plan, stage.module) else Op.BACKWARD
                    listed += (Instruction(Op.RECV_BACKWARD, node, microbatch, edge) for edge in outputs[node])
                    listed.append(Instruction(op, node, microbatch))
                    listed += (Instruction(Op.SEND_BACKWARD, node, microbatch, edge) for edge in owed[node])
                else:
                    listed.append(Instruction(Op.BACKWARD_WEIGHT, node, microbatch))
            lists[worker] = (*listed, *(Instruction(Op.SYNC_GRADIENTS, node) for node in workers[worker].nodes))
    return Program(
        nodes=nodes,
        workers=workers,
        edges=edges,
        num_microbatches=plan.num_microbatches,
        instructions=tuple(lists),
    )


def _workers_of_group(stages: tuple[StageReplicas, ...], group: int) -> range:
    stage = next(stage for stage in reversed(stages) if stage.group == group and stage.num_groups == 1)
    return range(stage.first_worker, stage.first_worker + stage.dp * stage.span)


def _edges(plan: Plan, stages: tuple[StageReplicas, ...]) -> tuple[Edge, ...]:
    """Bridges first: each encoder replica to each of the LLM's, or, where they share a grid, to its own."""
    first_llm = next(stage for stage in stages if stage.module == "llm")
    bridges = [
        Edge(stage.first_node + source, first_llm.first_node + target, True)
        for stage in stages
        if stage.module != "llm" and stage.pp_stage == plan.num_stages(stage.module) - 1
        for source in range(stage.dp)
        for target in PLACEMENTS[plan.placement].bridged_replicas(source, first_llm.dp)
    ]
    inside = [
        Edge(stage.first_node + replica, stage.first_node + stage.dp + replica, False)
        for stage in stages
        if stage.pp_stage < plan.num_stages(stage.module) - 1
        for replica in range(stage.dp)
    ]
    return (*bridges, *inside)
