"""The simulator: when every forward and backward of a step starts and ends, given how long each takes.

Times come by node and microbatch. They are copied into the arrays that `walk` reads, and `walk` computes the starts and
ends in one loop. Bridges (features that cross from encoders to the LLM) come as one entry for each message.
"""

from dataclasses import dataclass

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.step.carried import carry
from dflop.step.compiled import AHEAD, CompiledPlan
from dflop.step.simulation_kernel import (
    BRIDGE_IN,
    BRIDGE_OUT,
    DP,
    FIRST_NODE,
    FIRST_WORKER,
    HAS_BACKWARD,
    PARTS,
    SPAN,
    Messages,
    walk,
)
from dflop.step.syncs import add_syncs, per_worker, sync_parts

__all__ = [
    "Bridges",
    "StageTimes",
    "Timeline",
    "peak_bytes",
    "peak_bytes_of",
    "simulate",
    "simulate_step_s",
]

_BLOCK = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Bridges:
    """The messages from encoders to the LLM, one entry a message; each array is [num_messages].

    `source` is a node of an encoder's last stage, `target` one of the LLM's first, both numbered as in `nodes_of`.
    Gradients take as long on the way back. Where there are several global batches, `batch` is the index of the
    message's own.
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

    `forward_s` and `backward_s` are [num_nodes, num_microbatches]. `chain_s` [num_nodes, num_microbatches] is the time
    of the transfer to the next stage of the same module, and that of the transfer back from it. `sync_s` [num_nodes] is
    the time of the gradient sync and of the optimiser's step. Of that, `early_sync_s` [num_nodes] may run beside the
    node's last backward, and `late_sync_s` [num_nodes] beside its first forward (`syncs`), by default nothing. These
    three are always without the leading axis.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    chain_s: np.ndarray
    bridges: Bridges
    sync_s: np.ndarray
    early_sync_s: np.ndarray | None = None
    late_sync_s: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Starts and ends in seconds, [2 (forward, backward), num_nodes, num_microbatches].

    NaN where nothing runs. Each worker waits for its gradient syncs from `computed_s` to `synced_s`, [num_workers].
    `idle_of_worker` is by worker; `idle` is the mean over ranks.
    """

    start_s: np.ndarray
    end_s: np.ndarray
    computed_s: np.ndarray
    synced_s: np.ndarray
    step_s: float
    idle: float
    idle_of_worker: np.ndarray

    @property
    def busy_s(self) -> np.ndarray:
        """Seconds that each node computes, [num_nodes]."""
        return np.nansum(self.end_s - self.start_s, axis=(0, 2))


def simulate(plan: CompiledPlan, times: StageTimes, *, carried: bool = False) -> Timeline:
    """The timeline of one step (one global batch) with these times.

    Messages begin when they are made, or with `carried` as on a GPU, one operation of a channel after the other.
    """
    shape = (2, plan.num_nodes * plan.num_microbatches)
    start_s, end_s = np.full(shape, np.nan), np.full(shape, np.nan)
    steps_s, computed_s, synced_s = _run(plan, times, start_s, end_s, carried=carried)
    step_s = float(steps_s[0])
    start_s, end_s = (_by_node(plan, cells) for cells in (start_s, end_s))
    busy_s = synced_s - computed_s + per_worker(plan.stages, np.nansum(end_s - start_s, axis=(0, 2)), plan.num_workers)
    idle_of_worker = 1 - busy_s / step_s if step_s > 0 else np.zeros(plan.num_workers)
    return Timeline(
        start_s=start_s,
        end_s=end_s,
        computed_s=computed_s,
        synced_s=synced_s,
        step_s=step_s,
        idle=float(np.average(idle_of_worker, weights=plan.ranks_of_worker)),
        idle_of_worker=idle_of_worker,
    )


def simulate_step_s(plan: CompiledPlan, times: StageTimes) -> float | np.ndarray:
    """The step time alone, in seconds; with several global batches an array [num_batches]."""
    end_s = np.empty((2, plan.num_nodes * plan.num_microbatches))
    step_s, _, _ = _run(plan, times, np.empty((0, 0)), end_s)
    return step_s if times.forward_s.ndim == 3 else float(step_s[0])


def peak_bytes(
    plan: CompiledPlan, activation_bytes: np.ndarray, transient_bytes: np.ndarray, sent_bytes: np.ndarray
) -> np.ndarray:
    """The most bytes that each rank of a worker holds at a time for microbatches in flight, [num_workers].

    All arrays are [num_nodes, num_microbatches]: the bytes that a microbatch keeps from its forward to the end of its
    backward, those that come on top while it is computed, and those of the gradient that it sends, which is kept for a
    while (`instructions.kept_until`). Only the order of computations matters, not their times.
    """
    return peak_bytes_of(plan.order, plan.stages, activation_bytes, transient_bytes, sent_bytes, plan.num_workers)


def _by_node(plan: CompiledPlan, cells: np.ndarray) -> np.ndarray:
    """Values by cell, [2, num_cells], as [2, num_nodes, num_microbatches]."""
    parts, first = [], 0
    for dp in plan.stages[:, DP]:
        own = cells[:, first : first + dp * plan.num_microbatches]
        parts.append(own.reshape(2, plan.num_microbatches, dp).transpose(0, 2, 1))
        first += dp * plan.num_microbatches
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def _run(
    plan: CompiledPlan, times: StageTimes, start_s: np.ndarray, end_s: np.ndarray, *, carried: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The step times [num_batches]; when each worker has computed, and when it has synced, in the last of them."""
    shape = (-1, plan.num_nodes, plan.num_microbatches)
    forward_s = times.forward_s.reshape(shape)
    bridges = times.bridges
    batch = np.zeros_like(bridges.microbatch) if bridges.batch is None else bridges.batch
    of_plan = plan.last_backwards, plan.stages, plan.num_workers, plan.num_encoders
    of_batches = (
        forward_s,
        times.backward_s.reshape(shape),
        times.chain_s.reshape(shape),
        (batch, bridges.microbatch, bridges.source, bridges.target, bridges.seconds),
        sync_parts(plan, times.sync_s, times.early_sync_s, times.late_sync_s),
    )
    # Two kernels, as machines without GPUs need not compile the second.
    if carried:
        return _carry_batch(plan.order, of_plan, of_batches, start_s, end_s)
    return _walk_batches(plan.items, of_plan, of_batches, start_s, end_s)


@kernel
def _walk_batches(items, of_plan, of_batches, start_s, end_s):
    """The results of `_run`.

    `end_s` and `start_s` are those of `walk` for the last batch; they need not be cleared between batches, since `walk`
    reads only ends that it has written."""
    last_backwards, stages, num_workers, num_encoders = of_plan
    forward_s, backward_s, chain_s, bridges, syncs = of_batches
    num_batches, num_nodes, num_microbatches = forward_s.shape
    starts, source, target, message_s = _in_lists(num_batches, num_microbatches, num_encoders, stages, bridges)
    num_lists = num_microbatches * num_encoders * stages[:, PARTS].max()
    seconds, ways_s = np.empty((2, num_nodes * num_microbatches)), np.empty(num_nodes * num_microbatches)
    clocks, synced_s, step_s = np.empty(num_workers), np.empty(num_workers), np.empty(num_batches)
    for batch in range(num_batches):
        own_s = forward_s[batch], backward_s[batch], chain_s[batch]
        for stage in range(len(stages)):
            _put_in_cells(stages[stage], own_s, seconds, ways_s)
        own = starts[batch * num_lists : (batch + 1) * num_lists + 1]
        messages = Messages(own[:-1], own[1:] - own[:-1], source, target, message_s)
        walk(items, seconds, ways_s, messages, syncs, clocks, end_s, start_s)
        add_syncs((last_backwards, stages, num_microbatches), seconds, end_s, clocks, syncs, synced_s)
        step_s[batch] = synced_s.max()
    return step_s, clocks, synced_s


@kernel
def _carry_batch(order, of_plan, of_batches, start_s, end_s):
    """The results of `_run` for one batch whose messages are carried in this order."""
    last_backwards, stages, num_workers, num_encoders = of_plan
    forward_s, backward_s, chain_s, bridges, syncs = of_batches
    num_batches, num_nodes, num_microbatches = forward_s.shape
    starts, source, target, message_s = _in_lists(num_batches, num_microbatches, num_encoders, stages, bridges)
    messages = Messages(starts[:-1], starts[1:] - starts[:-1], source, target, message_s)
    seconds, ways_s = np.empty((2, num_nodes * num_microbatches)), np.empty(num_nodes * num_microbatches)
    for stage in range(len(stages)):
        _put_in_cells(stages[stage], (forward_s[0], backward_s[0], chain_s[0]), seconds, ways_s)
    clocks, synced_s = np.empty(num_workers), np.empty(num_workers)
    carry(order, stages, seconds, ways_s, messages, syncs, clocks, end_s, start_s)
    add_syncs((last_backwards, stages, num_microbatches), seconds, end_s, clocks, syncs, synced_s)
    return np.full(1, synced_s.max()), clocks, synced_s


@kernel
def _put_in_cells(stage, times_s, seconds, ways_s):
    """Write a stage's times, each given for all stages as [num_nodes, num_microbatches], to the arrays of `walk`."""
    forward_s, backward_s, chain_s = times_s
    num_microbatches = forward_s.shape[1]
    dp, first_node = stage[DP], stage[FIRST_NODE]
    # A few replicas at a time: one by one, each cell would be written to another line of the processor's cache.
    for begin in range(0, dp, _BLOCK):
        for microbatch in range(num_microbatches):
            first_cell = first_node * num_microbatches + microbatch * dp
            for replica in range(begin, min(dp, begin + _BLOCK)):
                node, cell = first_node + replica, first_cell + replica
                seconds[FORWARD, cell] = forward_s[node, microbatch]
                seconds[BACKWARD, cell] = backward_s[node, microbatch]
                ways_s[cell] = chain_s[node, microbatch]


@kernel
def _in_lists(num_batches, num_microbatches, num_encoders, stages, bridges):
    """The messages sorted by batch and list, as cells; and where each list begins, [num_batches * num_lists + 1]."""
    batch, microbatch, source, target, seconds = bridges
    num_parts = stages[:, PARTS].max()
    num_lists = num_batches * num_microbatches * num_encoders * num_parts
    starts = np.zeros(num_lists + 1, dtype=np.uint64)
    own_list = np.empty(len(source), dtype=np.int64)
    sources, targets = np.empty(len(source), dtype=np.uint64), np.empty(len(source), dtype=np.uint64)
    message_s = np.empty(len(source))
    if len(source) == 0:
        return starts, sources, targets, message_s
    # The first nodes of the encoders' last stages, by encoder, and the stages; behind them the LLM's first stage.
    ends = np.empty(num_encoders + 1, dtype=np.int64)
    for stage in range(len(stages)):
        if stages[stage, BRIDGE_OUT] >= 0:
            ends[stages[stage, BRIDGE_OUT]] = stage
            ends[num_encoders] = stage + 1
    for message in range(len(source)):
        encoder = 0
        while source[message] >= stages[ends[encoder], FIRST_NODE] + stages[ends[encoder], DP]:
            encoder += 1
        own_stage = stages[ends[encoder]]
        part = (source[message] - own_stage[FIRST_NODE]) * own_stage[PARTS] // own_stage[DP]
        of_encoder = (batch[message] * num_microbatches + microbatch[message]) * num_encoders + encoder
        own_list[message] = of_encoder * num_parts + part
        starts[own_list[message] + 1] += np.uint64(1)
    for number in range(num_lists):
        starts[number + 1] += starts[number]
    free = starts[:-1].copy()
    for message in range(len(source)):
        place = free[own_list[message]]
        free[own_list[message]] += np.uint64(1)
        encoder = own_list[message] // num_parts % num_encoders
        sources[place] = _cell(stages, ends[encoder], source[message], microbatch[message], num_microbatches)
        targets[place] = _cell(stages, ends[num_encoders], target[message], microbatch[message], num_microbatches)
        message_s[place] = seconds[message]
    return starts, sources, targets, message_s


@kernel
def _cell(stages, stage, node, microbatch, num_microbatches):
    first_node = stages[stage, FIRST_NODE]
    return first_node * num_microbatches + microbatch * stages[stage, DP] + node - first_node


@kernel
def peak_bytes_of(order, stages, kept, transient, sent, num_workers):
    """`peak_bytes` for kernels: `order` and `stages` as in `CompiledPlan`."""
    held, peak = np.zeros(num_workers), np.zeros(num_workers)
    for item in range(len(order)):
        which, stage, microbatch, part = order[item]
        frees = which == BACKWARD or not stages[stage, HAS_BACKWARD]
        until = AHEAD if stages[stage, BRIDGE_IN] > 0 else 1
        num_replicas = stages[stage, DP] // stages[stage, PARTS]
        for replica in range(part * num_replicas, (part + 1) * num_replicas):
            node = stages[stage, FIRST_NODE] + replica
            for lane in range(stages[stage, SPAN]):
                worker = stages[stage, FIRST_WORKER] + replica * stages[stage, SPAN] + lane
                if which == FORWARD:
                    held[worker] += kept[node, microbatch]
                peak[worker] = max(peak[worker], held[worker] + transient[node, microbatch])
                if frees:
                    held[worker] += sent[node, microbatch] - kept[node, microbatch]
                    if microbatch >= until:
                        held[worker] -= sent[node, microbatch - until]
    return peak
