"""The dependencies of a step, computation by computation, for linear programs over a few replicas.

No replicas may share parameters. The simulator's walk has the same dependencies in the order of its loop; here each is
listed by itself.
"""

from typing import NamedTuple

import numpy as np

from dflop.plan.passes import BACKWARD, FORWARD
from dflop.step.compiled import CompiledPlan
from dflop.step.simulation_kernel import (
    BRIDGE_IN,
    BRIDGE_OUT,
    DP,
    FIRST_WORKER,
    PARTS,
    SPAN,
    STAGE_BEFORE,
    STAGE_BEHIND,
)

__all__ = ["Computation", "computations_of"]


class Computation(NamedTuple):
    """A replica's pass of a microbatch. The computations that it waits for are given by index in the list of all."""

    which: int
    stage: int
    replica: int
    microbatch: int
    on_workers: tuple[int, ...]  # the last computations of its workers before it
    neighbour: int  # the same pass of the stage before (forward) or behind (backward), -1 for none
    bridged: tuple[int, ...]  # the same pass at the other ends of its bridges


def computations_of(plan: CompiledPlan) -> tuple[list[Computation], list[int]]:
    """All computations, each after those that it waits for; and the index of each worker's last one."""
    stages = plan.stages
    bridge_ends = {
        FORWARD: np.flatnonzero(stages[:, BRIDGE_OUT] >= 0).tolist(),
        BACKWARD: np.flatnonzero(stages[:, BRIDGE_IN]).tolist(),
    }
    number: dict[tuple[int, int, int, int], int] = {}
    last: dict[int, int] = {}
    computations = []
    for which, stage, microbatch, part in plan.order.tolist():
        is_forward = which == FORWARD
        neighbour = int(stages[stage, STAGE_BEFORE if is_forward else STAGE_BEHIND])
        is_end = stages[stage, BRIDGE_IN] > 0 if is_forward else stages[stage, BRIDGE_OUT] >= 0
        bridged = bridge_ends[which] if is_end else []
        num_replicas = int(stages[stage, DP] // stages[stage, PARTS])
        for replica in range(part * num_replicas, (part + 1) * num_replicas):
            first_worker = int(stages[stage, FIRST_WORKER] + replica * stages[stage, SPAN])
            workers = range(first_worker, first_worker + int(stages[stage, SPAN]))
            computations.append(
                Computation(
                    which=which,
                    stage=stage,
                    replica=replica,
                    microbatch=microbatch,
                    on_workers=tuple(dict.fromkeys(last[worker] for worker in workers if worker in last)),
                    neighbour=number[which, neighbour, replica, microbatch] if neighbour >= 0 else -1,
                    bridged=tuple(
                        number[which, other, its_replica, microbatch]
                        for other in bridged
                        for its_replica in range(stages[other, DP])
                    ),
                )
            )
            number[which, stage, replica, microbatch] = len(computations) - 1
            last |= dict.fromkeys(workers, len(computations) - 1)
    return computations, [last[worker] for worker in range(plan.num_workers)]
