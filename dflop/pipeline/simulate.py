"""The simulator: when every forward and backward of a step starts and ends, given how long each takes.

Pricing a batch is a single pass over a compiled plan's order, with all replicas of a stage in an inner loop; the
planner and the scheduler make millions of them. Bridges are given as they are used: one entry a message.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from dflop.pipeline.compiled import (
    BRIDGE_IN,
    BRIDGE_OUT,
    DP,
    FIRST_NODE,
    FIRST_WORKER,
    KIND,
    NO_BACKWARD,
    SPAN,
    SPLIT_BACKWARD,
    STAGE_BEFORE,
    STAGE_BEHIND,
    WHOLE_BACKWARD,
    CompiledPlan,
)
from dflop.pipeline.passes import BACKWARD, FORWARD, WEIGHT

__all__ = ["Bridges", "StageTimes", "Timeline", "peak_bytes", "per_worker", "simulate", "simulate_step_s"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bridges:
    """What crosses from encoders to the LLM, one entry a message; each array is [num_messages].

    `source` is a node of an encoder's last stage, `target` one of the LLM's first, both numbered as in `nodes_of`;
    gradients take as long on the way back. `batch` says of which global batch a message is, where there are several.
    """

    source: np.ndarray
    target: np.ndarray
    microbatch: np.ndarray
    seconds: np.ndarray
    batch: np.ndarray | None = None

    @classmethod
    def none(cls) -> "Bridges":
        nothing = np.zeros(0, dtype=np.int64)
        return cls(source=nothing, target=nothing, microbatch=nothing, seconds=np.zeros(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of a step's parts, of one global batch or, with a leading axis everywhere, of several.

    `forward_s` and `backward_s` are [num_nodes, num_microbatches]; so is `weight_s`, the part of `backward_s` that only
    weights wait for, which schedules that split the backward need. `chain_s` [num_nodes, num_microbatches] is what
    it takes to the next stage of the same module and back from it. `sync_s` [num_nodes] is the gradient sync's,
    always without the leading axis.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    chain_s: np.ndarray
    bridges: Bridges
    sync_s: np.ndarray
    weight_s: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Starts and ends in seconds, [3 (forward, backward or its input part, weight part), num_nodes, num_microbatches].

    NaN where nothing runs. `idle_of_worker` is by worker; `idle` is the mean over ranks.
    """

    start_s: np.ndarray
    end_s: np.ndarray
    step_s: float
    idle: float
    idle_of_worker: np.ndarray

    @property
    def busy_s(self) -> np.ndarray:
        """Seconds that each node computes, [num_nodes]."""
        return np.nansum(self.end_s - self.start_s, axis=(0, 2))


def simulate(plan: CompiledPlan, times: StageTimes) -> Timeline:
    """Run one step with the given times."""
    shape = (1, 3, plan.num_nodes, plan.num_microbatches)
    start_s, end_s = np.full(shape, np.nan), np.full(shape, np.nan)
    step_s = float(_run(plan, times, start_s, end_s)[0])
    busy_s = per_worker(plan.stages, times.sync_s + np.nansum(end_s - start_s, axis=(0, 1, 3)), plan.num_workers)
    idle_of_worker = 1 - busy_s / step_s if step_s > 0 else np.zeros(plan.num_workers)
    return Timeline(
        start_s=start_s[0],
        end_s=end_s[0],
        step_s=step_s,
        idle=float(np.average(idle_of_worker, weights=plan.ranks_of_worker)),
        idle_of_worker=idle_of_worker,
    )


def simulate_step_s(plan: CompiledPlan, times: StageTimes) -> float | np.ndarray:
    """The step time alone; of several global batches [num_batches]."""
    end_s = np.empty((1, 3 if plan.splits_backward else 2, plan.num_nodes, plan.num_microbatches))
    step_s = _run(plan, times, np.empty((0, 0, 0, 0)), end_s)
    return step_s if times.forward_s.ndim == 3 else float(step_s[0])


def peak_bytes(plan: CompiledPlan, activation_bytes: np.ndarray, transient_bytes: np.ndarray) -> np.ndarray:
    """The most that each worker holds at a time for microbatches in flight, [num_workers], on each of its ranks.

    Both arrays are [num_nodes, num_microbatches]: what a microbatch keeps from its forward to the end of its
    backward (to its weight part, where that is apart), and what comes on top while it is computed. Only the order
    matters, not how long anything takes.
    """
    return _peak(plan.order, plan.stages, activation_bytes, transient_bytes, plan.num_workers)


def _run(plan: CompiledPlan, times: StageTimes, start_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
    assert times.weight_s is not None or not plan.splits_backward, "zb_h1 needs to know the weights' part"
    shape = (-1, plan.num_nodes, plan.num_microbatches)
    forward_s = times.forward_s.reshape(shape)
    bridges = times.bridges
    batch = np.zeros_like(bridges.microbatch) if bridges.batch is None else bridges.batch
    return _walk(
        plan.order,
        plan.stages,
        plan.num_workers,
        forward_s,
        times.backward_s.reshape(shape),
        (times.backward_s if times.weight_s is None else times.weight_s).reshape(shape),
        times.chain_s.reshape(shape),
        *_by_microbatch(len(forward_s), plan.num_microbatches, batch, bridges.microbatch, bridges.source,
                        bridges.target, bridges.seconds),
        times.sync_s,
        start_s,
        end_s,
    )  # fmt: skip


@njit(cache=True)
def _by_microbatch(num_batches, num_microbatches, batch, microbatch, source, target, seconds):
    """The messages sorted by (batch, microbatch), and where each of these cells begins, [num_cells + 1]."""
    num_cells = num_batches * num_microbatches
    starts = np.zeros(num_cells + 1, dtype=np.int64)
    for message in range(len(source)):
        starts[batch[message] * num_microbatches + microbatch[message] + 1] += 1
    for cell in range(num_cells):
        starts[cell + 1] += starts[cell]
    free = starts[:-1].copy()
    sorted_source, sorted_target = np.empty(len(source), dtype=np.int64), np.empty(len(source), dtype=np.int64)
    sorted_seconds = np.empty(len(source))
    for message in range(len(source)):
        cell = batch[message] * num_microbatches + microbatch[message]
        place = free[cell]
        free[cell] += 1
        sorted_source[place], sorted_target[place] = source[message], target[message]
        sorted_seconds[place] = seconds[message]
    return starts, sorted_source, sorted_target, sorted_seconds


@njit(cache=True)
def _walk(
    order,
    stages,
    num_workers,
    forward_s,
    backward_s,
    weight_s,
    chain_s,
    message_starts,
    source,
    target,
    message_s,
    sync_s,
    start_s,
    end_s,
):
    """Step times [num_batches]. `end_s` is written for the last batch (`order` never reads what is not written yet);
    `start_s` too unless it is empty."""
    num_batches, _, num_microbatches = forward_s.shape
    keeps_starts = start_s.size > 0
    step_s = np.zeros(num_batches)
    arrived_s = np.zeros(stages[:, DP].max())
    for batch in range(num_batches):
        clocks = np.zeros(num_workers)
        for item in range(len(order)):
            which, stage, microbatch = order[item, 0], order[item, 1], order[item, 2]
            dp, first_node, span = stages[stage, DP], stages[stage, FIRST_NODE], stages[stage, SPAN]
            is_split = stages[stage, KIND] == SPLIT_BACKWARD
            neighbour = -1
            if which != WEIGHT:
                is_forward = which == FORWARD
                neighbour = stages[stage, STAGE_BEFORE] if is_forward else stages[stage, STAGE_BEHIND]
                if stages[stage, BRIDGE_IN if is_forward else BRIDGE_OUT]:
                    cell = batch * num_microbatches + microbatch
                    for message in range(message_starts[cell], message_starts[cell + 1]):
                        here, there = target[message] - first_node, source[message]
                        if not is_forward:
                            here, there = source[message] - first_node, target[message]
                        if 0 <= here < dp:
                            arrived_s[here] = max(
                                arrived_s[here], end_s[0, which, there, microbatch] + message_s[message]
                            )
            for replica in range(dp):
                node = first_node + replica
                worker = stages[stage, FIRST_WORKER] + replica * span
                ready_s = max(arrived_s[replica], clocks[worker])
                arrived_s[replica] = 0.0
                for lane in range(1, span):
                    ready_s = max(ready_s, clocks[worker + lane])
                if which == FORWARD:
                    duration_s = forward_s[batch, node, microbatch]
                    if neighbour >= 0:
                        other = stages[neighbour, FIRST_NODE] + replica
                        ready_s = max(ready_s, end_s[0, 0, other, microbatch] + chain_s[batch, other, microbatch])
                elif which == BACKWARD:
                    duration_s = backward_s[batch, node, microbatch]
                    if is_split:
                        duration_s -= weight_s[batch, node, microbatch]
                    if neighbour >= 0:
                        other = stages[neighbour, FIRST_NODE] + replica
                        ready_s = max(ready_s, end_s[0, 1, other, microbatch] + chain_s[batch, node, microbatch])
                else:
                    duration_s = weight_s[batch, node, microbatch]
                for lane in range(span):
                    clocks[worker + lane] = ready_s + duration_s
                end_s[0, which, node, microbatch] = ready_s + duration_s
                if keeps_starts:
                    start_s[0, which, node, microbatch] = ready_s
        clocks += per_worker(stages, sync_s, num_workers)
        step_s[batch] = clocks.max()
    return step_s


@njit(cache=True)
def per_worker(stages, values, num_workers):
    """Sums over the nodes that each worker carries."""
    sums = np.zeros(num_workers)
    for stage in range(len(stages)):
        for replica in range(stages[stage, DP]):
            for lane in range(stages[stage, SPAN]):
                worker = stages[stage, FIRST_WORKER] + replica * stages[stage, SPAN] + lane
                sums[worker] += values[stages[stage, FIRST_NODE] + replica]
    return sums


@njit(cache=True)
def _peak(order, stages, kept, transient, num_workers):
    held, peak = np.zeros(num_workers), np.zeros(num_workers)
    for item in range(len(order)):
        which, stage, microbatch = order[item, 0], order[item, 1], order[item, 2]
        kind = stages[stage, KIND]
        # What ends here: the whole backward or its last part; a forward that no backward follows.
        is_end = which == (FORWARD if kind == NO_BACKWARD else BACKWARD if kind == WHOLE_BACKWARD else WEIGHT)
        for replica in range(stages[stage, DP]):
            node = stages[stage, FIRST_NODE] + replica
            for lane in range(stages[stage, SPAN]):
                worker = stages[stage, FIRST_WORKER] + replica * stages[stage, SPAN] + lane
                if which == FORWARD:
                    held[worker] += kept[node, microbatch]
                peak[worker] = max(peak[worker], held[worker] + transient[node, microbatch])
                if is_end:
                    held[worker] -= kept[node, microbatch]
    return peak
