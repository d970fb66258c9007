"""The instruction list: what every worker does in one step, in which order.

A pure function of the plan. The simulator prices the list, the trainer executes it. Workers are numbered
as in `Plan.workers`; an edge joins a worker to one that consumes what it makes, inside a module or over
the bridge between two modules. What travels over an edge is known from the schedule, so a list holds no
sizes; an edge without data for a microbatch is skipped by both ends.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from dflop.pipeline.plan import Plan, Worker

__all__ = ["Edge", "Instruction", "Op", "Program", "Span", "make_program"]


class Op(StrEnum):
    """Letters as in torch's pipeline schedules, where it has one."""

    RECV_FORWARD = "RECV_F"
    FORWARD = "F"
    SEND_FORWARD = "SEND_F"
    RECV_BACKWARD = "RECV_B"
    BACKWARD = "B"
    SEND_BACKWARD = "SEND_B"
    SYNC_GRADIENTS = "SYNC"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action; `microbatch` is -1 for the gradient sync, `edge` the index of the edge for transfers."""

    op: Op
    microbatch: int = -1
    edge: int = -1

    def __str__(self) -> str:
        where = f"@{self.edge}" if self.edge >= 0 else ""
        return f"{self.microbatch if self.microbatch >= 0 else ''}{self.op}{where}"


@dataclass(frozen=True, slots=True)
class Span:
    """An instruction that was carried out; times are seconds on the host's monotonic clock."""

    op: Op
    microbatch: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Edge:
    """Data flows from worker `source` to worker `target` going forward, back again going backward."""

    source: int
    target: int
    is_bridge: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Every worker's instructions for one step, and the edges they speak of."""

    workers: tuple[Worker, ...]
    edges: tuple[Edge, ...]
    num_microbatches: int
    instructions: tuple[tuple[Instruction, ...], ...]


def make_program(plan: Plan, frozen: Collection[str] = ()) -> Program:
    """The 1F1B program of a plan. Modules in `frozen` compute no gradients, and encoders among them no backward.

    The encoder stage stands before the LLM's stages in one chain of `depth` stages; the stage at place s
    runs `depth - s - 1` forwards ahead of its first backward (PipeDream-Flush, Narayanan et al. 2021).
    """
    assert plan.schedule == "1f1b", plan.schedule
    workers = plan.workers
    edges = _edges(plan)
    llm_depth = plan.grid("llm").pp
    programs = []
    for index, worker in enumerate(workers):
        ahead = llm_depth - worker.pp_stage - 1 if worker.module == "llm" else llm_depth
        inputs = [number for number, edge in enumerate(edges) if edge.target == index]
        outputs = [number for number, edge in enumerate(edges) if edge.source == index]
        # A frozen encoder computes no gradient, so neither end of its bridge moves one.
        has_backward = worker.module == "llm" or worker.module not in frozen
        owed = [
            number
            for number in inputs
            if workers[edges[number].source].module == "llm" or workers[edges[number].source].module not in frozen
        ]
        forwards = [_forward(microbatch, inputs, outputs) for microbatch in range(plan.num_microbatches)]
        backwards = [
            _backward(microbatch, outputs, owed) if has_backward else [] for microbatch in range(plan.num_microbatches)
        ]
        programs.append((*_one_forward_one_backward(forwards, backwards, ahead), Instruction(Op.SYNC_GRADIENTS)))
    return Program(workers=workers, edges=edges, num_microbatches=plan.num_microbatches, instructions=tuple(programs))


def _edges(plan: Plan) -> tuple[Edge, ...]:
    place = {worker: index for index, worker in enumerate(plan.workers)}
    llm = plan.grid("llm")
    bridges = [
        Edge(place[Worker(encoder.module, encoder.pp - 1, source)], place[Worker("llm", 0, target)], True)
        for encoder in plan.grids[:-1]
        for source in range(encoder.dp)
        for target in range(llm.dp)
    ]
    inside = [
        Edge(place[Worker(grid.module, stage, replica)], place[Worker(grid.module, stage + 1, replica)], False)
        for grid in plan.grids
        for stage in range(grid.pp - 1)
        for replica in range(grid.dp)
    ]
    return (*bridges, *inside)


def _forward(microbatch: int, inputs: list[int], outputs: list[int]) -> list[Instruction]:
    return [
        *(Instruction(Op.RECV_FORWARD, microbatch, edge) for edge in inputs),
        Instruction(Op.FORWARD, microbatch),
        *(Instruction(Op.SEND_FORWARD, microbatch, edge) for edge in outputs),
    ]


def _backward(microbatch: int, outputs: list[int], inputs: list[int]) -> list[Instruction]:
    return [
        *(Instruction(Op.RECV_BACKWARD, microbatch, edge) for edge in outputs),
        Instruction(Op.BACKWARD, microbatch),
        *(Instruction(Op.SEND_BACKWARD, microbatch, edge) for edge in inputs),
    ]


def _one_forward_one_backward(
    forwards: list[list[Instruction]], backwards: list[list[Instruction]], ahead: int
) -> list[Instruction]:
    num_microbatches = len(forwards)
    ahead = min(ahead, num_microbatches)
    listed = [instruction for forward in forwards[:ahead] for instruction in forward]
    for microbatch in range(num_microbatches):
        if ahead + microbatch < num_microbatches:
            listed += forwards[ahead + microbatch]
        listed += backwards[microbatch]
    return listed
