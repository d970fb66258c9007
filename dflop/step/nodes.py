"""Who computes where: a plan's stages, their replicas (nodes), and the ranks that carry them (workers).

A *node* is one replica of one pipeline stage of a module: something that computes. A *worker* is a group of
ranks that always act together: one clock. With interleaving or shared ranks a worker carries several nodes.
Where modules that share ranks differ in tp, workers are as large as the smaller groups, and a node of the
larger tp is carried by several workers, which all take part in what it computes.

Replicas of a stage are numbered one after the other, so that whatever holds for all of them (above all their order of
computations) is kept once, for the stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan

__all__ = ["Node", "StageReplicas", "Worker", "nodes_of", "stages_of", "worker_of", "workers_of"]


@dataclass(frozen=True, slots=True)
class Node:
    """One replica of one pipeline stage; of an interleaved LLM, stage `chunk * pp + s` is chunk `chunk` of rank s.

    `is_last` is whether it is the module's last stage.
    """

    module: str
    pp_stage: int
    dp_rank: int
    is_last: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Worker:
    """Ranks `[first_rank, first_rank + num_ranks)`, and the indices of the nodes that they carry."""

    first_rank: int
    num_ranks: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReplicas:
    """All replicas of a stage: replica r is node `first_node + r`, on `span` workers from `first_worker + r * span` on.

    `group` numbers the lists of computations: all workers of a group have the same one. An encoder that shares the
    ranks of several of the LLM's stages is in the lists of all their groups, `num_groups` from `group` on.
    """

    module: str
    pp_stage: int
    dp: int
    tp: int
    first_node: int
    first_worker: int
    span: int
    group: int
    num_groups: int = 1
    is_last: bool = True

    def workers(self, replica: int) -> range:
        """The indices of the workers that carry a replica."""
        first = self.first_worker + replica * self.span
        return range(first, first + self.span)


@lru_cache(maxsize=256)
def stages_of(plan: Plan) -> tuple[StageReplicas, ...]:
    """All stages in the order of the plan's grids, which is also the order of their nodes."""
    placement, llm = PLACEMENTS[plan.placement], plan.grid("llm")
    shares_ranks, num_shared = placement.shares_ranks, len(placement.encoder_stages(llm.pp))
    worker_ranks = math.gcd(*(grid.tp for grid in plan.grids)) if shares_ranks else 0
    stages: list[StageReplicas] = []
    first_node = first_worker = first_group = 0
    for grid in plan.grids:
        span = grid.tp // worker_ranks if shares_ranks else 1
        for number in range(plan.num_stages(grid.module)):
            place = number % grid.pp
            stages.append(
                StageReplicas(
                    module=grid.module,
                    pp_stage=number,
                    dp=grid.dp,
                    tp=grid.tp,
                    first_node=first_node,
                    first_worker=first_worker + place * grid.dp * span,
                    span=span,
                    group=first_group + place,
                    num_groups=num_shared if shares_ranks and grid is not llm else 1,
                    is_last=number == plan.num_stages(grid.module) - 1,
                )
            )
            first_node += grid.dp
        if not shares_ranks:
            first_worker += grid.pp * grid.dp
            first_group += grid.pp
    return tuple(stages)


def nodes_of(plan: Plan) -> tuple[Node, ...]:
    """All nodes, by module, stage and replica."""
    return tuple(
        Node(stage.module, stage.pp_stage, replica, stage.is_last)
        for stage in stages_of(plan)
        for replica in range(stage.dp)
    )


def workers_of(plan: Plan) -> tuple[Worker, ...]:
    """All workers by rising rank; together they have all ranks of the world."""
    nodes: dict[int, list[int]] = {}
    num_ranks: dict[int, int] = {}
    for stage in stages_of(plan):
        for replica in range(stage.dp):
            for worker in stage.workers(replica):
                nodes.setdefault(worker, []).append(stage.first_node + replica)
                num_ranks[worker] = stage.tp // stage.span
    workers, first_rank = [], 0
    for worker in sorted(nodes):
        workers.append(Worker(first_rank, num_ranks[worker], tuple(nodes[worker])))
        first_rank += num_ranks[worker]
    return tuple(workers)


def worker_of(workers: Sequence[Worker], rank: int) -> int:
    """The index of a rank's worker."""
    return next(index for index, worker in enumerate(workers) if 0 <= rank - worker.first_rank < worker.num_ranks)
