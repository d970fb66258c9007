"""Gradient syncs in a step: which parts of them run beside computations, and what workers wait for.

A sync sums a stage's gradients over its replicas, and sends the updated parameters back to them. If devices compute
while they communicate, parts of it hide. Gradients are final layer by layer during the stage's last backward, so an
early part of the sync may run beside that: a worker's early parts follow each other, each from the start of its node's
last backward on. Updated parameters are needed layer by layer in the next step's first forward, so a late part may run
beside that: a worker's late parts follow each other from the start of a step on, in the order of its nodes' first
forwards. Whatever is left of all syncs follows when the worker's computations and early parts have ended.
"""

from typing import NamedTuple

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import BACKWARD
from dflop.step.compiled import CompiledPlan
from dflop.step.simulation_kernel import DP, FIRST_NODE, FIRST_WORKER, PARTS, SPAN

__all__ = ["SyncParts", "add_syncs", "per_worker", "sync_parts"]


class SyncParts(NamedTuple):
    """The parts of a plan's syncs, in seconds.

    `early_s` [num_nodes] are the early parts, or empty. `gathered_s` [num_nodes] is when the late parts have ended, so
    that a node has all of its parameters, since the start of the step, or empty. `rest_s` [num_workers] is the rest of
    all of a worker's syncs.
    """

    early_s: np.ndarray
    gathered_s: np.ndarray
    rest_s: np.ndarray


def sync_parts(
    plan: CompiledPlan, sync_s: np.ndarray, early_s: np.ndarray | None, late_s: np.ndarray | None
) -> SyncParts:
    """The parts of syncs that take `sync_s` [num_nodes], of which `early_s` and `late_s` [num_nodes] are such parts."""
    nothing, rest_s = np.zeros(0), sync_s
    for part in (early_s, late_s):
        rest_s = rest_s if part is None else rest_s - part
    return SyncParts(
        early_s=nothing if early_s is None else early_s,
        gathered_s=nothing if late_s is None else _gathered(plan.first_forwards, plan.stages, late_s, plan.num_workers),
        rest_s=per_worker(plan.stages, rest_s, plan.num_workers),
    )


@kernel
def add_syncs(order, seconds, end_s, clocks, syncs, synced_s):
    """Write to `synced_s` [num_workers] when each worker has ended its gradient syncs.

    `order` is the compiled plan's `last_backwards`, `stages` and `num_microbatches`; `seconds`, `end_s` and `clocks`
    are those of `walk`, and `syncs` are `SyncParts`.
    """
    last_backwards, stages, num_microbatches = order
    synced_s[:] = 0.0
    for place in range(len(last_backwards) if len(syncs.early_s) else 0):
        stage, part = last_backwards[place]
        dp, first_node, span = stages[stage, DP], stages[stage, FIRST_NODE], stages[stage, SPAN]
        first_cell = first_node * num_microbatches + (num_microbatches - 1) * dp
        num_replicas = dp // stages[stage, PARTS]
        for replica in range(part * num_replicas, (part + 1) * num_replicas):
            begun_s = end_s[BACKWARD, first_cell + replica] - seconds[BACKWARD, first_cell + replica]
            for lane in range(span):
                worker = stages[stage, FIRST_WORKER] + replica * span + lane
                synced_s[worker] = max(synced_s[worker], begun_s) + syncs.early_s[first_node + replica]
    for worker in range(len(clocks)):
        synced_s[worker] = max(clocks[worker], synced_s[worker]) + syncs.rest_s[worker]


@kernel
def per_worker(stages, values, num_workers):
    """Sums over the nodes that each worker carries."""
    sums = np.zeros(num_workers)
    for stage in range(len(stages)):
        for replica in range(stages[stage, DP]):
            for lane in range(stages[stage, SPAN]):
                worker = stages[stage, FIRST_WORKER] + replica * stages[stage, SPAN] + lane
                sums[worker] += values[stages[stage, FIRST_NODE] + replica]
    return sums


@kernel
def _gathered(first_forwards, stages, late_s, num_workers):
    clocks, gathered_s = np.zeros(num_workers), np.zeros(len(late_s))
    for place in range(len(first_forwards)):
        stage, part = first_forwards[place]
        num_replicas, span = stages[stage, DP] // stages[stage, PARTS], stages[stage, SPAN]
        for replica in range(part * num_replicas, (part + 1) * num_replicas):
            node = stages[stage, FIRST_NODE] + replica
            for lane in range(span):
                worker = stages[stage, FIRST_WORKER] + replica * span + lane
                clocks[worker] += late_s[node]
                gathered_s[node] = max(gathered_s[node], clocks[worker])
    return gathered_s
