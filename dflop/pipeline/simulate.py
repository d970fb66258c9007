"""The simulator: when every forward and backward of a program starts and ends, given how long each takes.

It walks the workers' lists as the trainer would: a worker does one thing at a time, in order, and waits for
what it needs. Compiled, because the planner and the scheduler call it thousands of times.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from dflop.pipeline.instructions import Op, Program

__all__ = ["CompiledProgram", "StageTimes", "Timeline", "compile_program", "simulate", "simulate_step_s"]

_FORWARD, _BACKWARD = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one step's parts.

    `forward_s` and `backward_s` are [num_workers, num_microbatches]; `transfer_s` is [num_edges,
    num_microbatches], NaN where an edge carries nothing and so nobody waits; `sync_s` is [num_workers].
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    transfer_s: np.ndarray
    sync_s: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Starts and ends in seconds, [2 (forward, backward), num_workers, num_microbatches]; NaN where nothing runs."""

    start_s: np.ndarray
    end_s: np.ndarray
    step_s: float
    idle: float
    idle_of_worker: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """A program as arrays: each worker's computations in order, and the edges that each must wait for."""

    num_workers: int
    num_microbatches: int
    ops: np.ndarray
    microbatches: np.ndarray
    counts: np.ndarray
    # For direction 0 (forward) and 1 (backward): edges that end at each worker, as offsets into a flat list.
    wait_offsets: np.ndarray
    wait_edges: np.ndarray
    edge_ends: np.ndarray


def compile_program(program: Program) -> CompiledProgram:
    num_workers = len(program.workers)
    computed = [
        [(_FORWARD if item.op is Op.FORWARD else _BACKWARD, item.microbatch) for item in items if item.op in ("F", "B")]
        for items in program.instructions
    ]
    counts = np.array([len(items) for items in computed], dtype=np.int64)
    ops = np.zeros((num_workers, max(counts)), dtype=np.int64)
    microbatches = np.zeros_like(ops)
    for worker, items in enumerate(computed):
        for place, (op, microbatch) in enumerate(items):
            ops[worker, place], microbatches[worker, place] = op, microbatch
    offsets = np.zeros((2, num_workers + 1), dtype=np.int64)
    waits: list[int] = []
    for direction, receive in ((_FORWARD, Op.RECV_FORWARD), (_BACKWARD, Op.RECV_BACKWARD)):
        for worker, items in enumerate(program.instructions):
            offsets[direction, worker] = len(waits)
            waits += sorted({item.edge for item in items if item.op is receive})
        offsets[direction, num_workers] = len(waits)
    return CompiledProgram(
        num_workers=num_workers,
        num_microbatches=program.num_microbatches,
        ops=ops,
        microbatches=microbatches,
        counts=counts,
        wait_offsets=offsets,
        wait_edges=np.array(waits, dtype=np.int64),
        edge_ends=np.array([(edge.source, edge.target) for edge in program.edges], dtype=np.int64).reshape(-1, 2),
    )


def simulate(program: CompiledProgram, times: StageTimes) -> Timeline:
    """Run the program once with the given times."""
    shape = (2, program.num_workers, program.num_microbatches)
    start_s, end_s = np.full(shape, np.nan), np.full(shape, np.nan)
    clocks = _walk(program, times, start_s, end_s)
    finished = clocks + times.sync_s
    step_s = float(finished.max())
    busy_s = times.sync_s + np.nansum(end_s - start_s, axis=(0, 2))
    idle_of_worker = 1 - busy_s / step_s if step_s > 0 else np.zeros(program.num_workers)
    return Timeline(
        start_s=start_s, end_s=end_s, step_s=step_s, idle=float(idle_of_worker.mean()), idle_of_worker=idle_of_worker
    )


def simulate_step_s(program: CompiledProgram, times: StageTimes) -> float:
    """The step time alone."""
    shape = (2, program.num_workers, program.num_microbatches)
    clocks = _walk(program, times, np.empty(shape), np.full(shape, np.nan))
    return float((clocks + times.sync_s).max())


def _walk(program: CompiledProgram, times: StageTimes, start_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
    clocks = np.zeros(program.num_workers)
    finished = _walk_compiled(
        program.ops,
        program.microbatches,
        program.counts,
        program.wait_offsets,
        program.wait_edges,
        program.edge_ends,
        times.forward_s,
        times.backward_s,
        times.transfer_s,
        start_s,
        end_s,
        clocks,
    )
    assert finished, "the instruction lists wait for each other in a circle"
    return clocks


@njit(cache=True)
def _walk_compiled(
    ops,
    microbatches,
    counts,
    wait_offsets,
    wait_edges,
    edge_ends,
    forward_s,
    backward_s,
    transfer_s,
    start_s,
    end_s,
    clocks,
):
    num_workers = len(counts)
    done = np.zeros(num_workers, dtype=np.int64)
    moved = True
    while moved:
        moved = False
        for worker in range(num_workers):
            while done[worker] < counts[worker]:
                op, microbatch = ops[worker, done[worker]], microbatches[worker, done[worker]]
                ready = clocks[worker]
                blocked = False
                for place in range(wait_offsets[op, worker], wait_offsets[op, worker + 1]):
                    edge = wait_edges[place]
                    delay = transfer_s[edge, microbatch]
                    if np.isnan(delay):
                        continue
                    # The other end: who sends forward is the edge's source, who sends backward its target.
                    arrived = end_s[op, edge_ends[edge, op], microbatch]
                    if np.isnan(arrived):
                        blocked = True
                        break
                    ready = max(ready, arrived + delay)
                if blocked:
                    break
                duration = forward_s[worker, microbatch] if op == 0 else backward_s[worker, microbatch]
                start_s[op, worker, microbatch] = ready
                end_s[op, worker, microbatch] = ready + duration
                clocks[worker] = ready + duration
                done[worker] += 1
                moved = True
    return (done == counts).all()
