"""Columns: groups of nodes and workers whose times depend on each other directly.

A column holds all stages of a replica and all nodes on the same workers. Two columns wait for each other only at
bridges, and where an encoder's replicas share parameters. So a change of one replica's work changes the times of its
own column first. LLM replicas that share parameters are in one column.
"""

import numpy as np

from dflop.base.kernels import kernel
from dflop.step.compiled import CompiledPlan
from dflop.step.simulation_kernel import DP, FIRST_NODE, FIRST_WORKER, SHARED, SPAN, STAGE_BEFORE, STAGE_BEHIND

__all__ = ["columns_of"]


def columns_of(plan: CompiledPlan) -> tuple[np.ndarray, np.ndarray]:
    """The column of each node, [num_nodes], and of each worker, [num_workers], numbered from 0."""
    of_nodes, of_workers = _labels(plan.stages, plan.num_nodes, plan.num_workers)
    names = np.unique(of_nodes)
    return np.searchsorted(names, of_nodes), np.searchsorted(names, of_workers)


@kernel
def _labels(stages, num_nodes, num_workers):
    # Labels spread over nodes that share a worker or a chain until none changes.
    node_label, worker_label = np.arange(num_nodes), np.full(num_workers, num_nodes)
    moved = True
    while moved:
        moved = False
        for stage in range(len(stages)):
            for replica in range(stages[stage, DP]):
                node = stages[stage, FIRST_NODE] + replica
                label = node_label[node]
                if stage == len(stages) - 1:  # of the LLM
                    label = min(label, node_label[node - replica % stages[stage, SHARED]])
                for neighbour in (stages[stage, STAGE_BEFORE], stages[stage, STAGE_BEHIND]):
                    if neighbour >= 0:
                        label = min(label, node_label[stages[neighbour, FIRST_NODE] + replica])
                first_worker = stages[stage, FIRST_WORKER] + replica * stages[stage, SPAN]
                for worker in range(first_worker, first_worker + stages[stage, SPAN]):
                    label = min(label, worker_label[worker])
                for worker in range(first_worker, first_worker + stages[stage, SPAN]):
                    moved = moved or worker_label[worker] != label
                    worker_label[worker] = label
                moved = moved or node_label[node] != label
                node_label[node] = label
    return node_label, worker_label
