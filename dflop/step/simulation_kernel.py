"""The simulator's walk: when everything in a step ends, in one pass over a compiled plan's order.

Planning, scheduling and the step search call it millions of times. So whatever is the same for all steps of a plan is
worked out beforehand (`walk_items`), all replicas of a stage stand side by side in memory, and nothing is allocated.

A *cell* is one replica's microbatch in one stage; those of a stage lie together, by microbatch and then by replica:
cell (stage, microbatch, replica) is `first_node * num_microbatches + microbatch * dp + replica`. The messages over
bridges stand in lists, one for each microbatch, encoder and part of its replicas (most plans have one part): list
(microbatch, encoder, part) is number `(microbatch * num_encoders + encoder) * num_parts + part`. Indices are unsigned:
numba would check of each signed index whether it counts from the end, which takes more time than the rest of the walk.
"""

from typing import NamedTuple

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import FORWARD

__all__ = [
    "BRIDGE_IN",
    "BRIDGE_OUT",
    "DP",
    "FIRST_NODE",
    "FIRST_WORKER",
    "HAS_BACKWARD",
    "NUM_COLUMNS",
    "PARTS",
    "SHARED",
    "SPAN",
    "STAGE_BEFORE",
    "STAGE_BEHIND",
    "TRACK",
    "Messages",
    "walk",
    "walk_items",
]

# Columns of `CompiledPlan.stages`:
# - STAGE_BEFORE and STAGE_BEHIND: the neighbouring stages of the same module, -1 where there is none.
# - BRIDGE_IN: 1 for the LLM's first stage, where bridges end. BRIDGE_OUT: for an encoder's last stage, where bridges
#   begin, the number of the encoder; -1 elsewhere.
# - HAS_BACKWARD: 1, or 0 for stages of frozen encoders.
# - SHARED: how many neighbouring replicas share parameters or samples, and so wait for each other in each pass; else 1.
# - PARTS: the replicas come in so many equal parts, each with its own order.
# - TRACK: that of the edges to the next stage of the same module (`routes.Edge`).
NUM_COLUMNS = 12
DP, FIRST_NODE, FIRST_WORKER, SPAN, STAGE_BEFORE, STAGE_BEHIND, BRIDGE_IN, BRIDGE_OUT, HAS_BACKWARD, SHARED = range(10)
PARTS, TRACK = range(10, NUM_COLUMNS)

# Columns of `walk_items`. An item is a pass of a microbatch on all replicas of a stage, or on a part of them. The
# columns are: the pass; the first cell; the number of replicas; their first worker, and workers a replica; whether the
# item waits for the same pass of a neighbouring stage, and the first cell of that; the first list of messages that it
# waits for, and how many lists; SHARED of the stage; whether it is the first forward, and its first node.
_PASS, _CELL, _DP, _WORKER, _SPAN, _HAS_NEIGHBOUR, _NEIGHBOUR, _FIRST_LIST, _NUM_LISTS, _SHARED, _IS_FIRST, _NODE = (
    range(12)
)


class Messages(NamedTuple):
    """The messages over bridges, in lists: list l is the `count[l]` entries from `first[l]` on, in any order."""

    first: np.ndarray  # unsigned, [num_lists]
    count: np.ndarray  # unsigned, [num_lists]
    source: np.ndarray  # unsigned, [num_entries]: the cell of an encoder's last stage
    target: np.ndarray  # unsigned, [num_entries]: the cell of the LLM's first stage
    seconds: np.ndarray  # [num_entries], the same in both directions


def walk_items(order: np.ndarray, stages: np.ndarray, num_microbatches: int) -> np.ndarray:
    """A plan's order, [num_items, 4] of pass, stage, microbatch and part of the replicas, as `walk` takes it: uint64
    [num_items, 12]."""
    which, stage, microbatch, part = order.T
    num_replicas, num_parts = stages[stage, DP] // stages[stage, PARTS], stages[:, PARTS].max()
    is_forward = which == FORWARD
    neighbour = np.where(is_forward, stages[stage, STAGE_BEFORE], stages[stage, STAGE_BEHIND])
    has_neighbour = neighbour >= 0
    encoder, num_encoders = stages[stage, BRIDGE_OUT], stages[:, BRIDGE_OUT].max() + 1
    takes_all, takes_own = is_forward & (stages[stage, BRIDGE_IN] > 0), ~is_forward & (encoder >= 0)

    def cell(stage: np.ndarray) -> np.ndarray:
        return stages[stage, FIRST_NODE] * num_microbatches + microbatch * stages[stage, DP] + part * num_replicas

    columns = {
        _PASS: which,
        _CELL: cell(stage),
        _DP: num_replicas,
        _WORKER: stages[stage, FIRST_WORKER] + part * num_replicas * stages[stage, SPAN],
        _SPAN: stages[stage, SPAN],
        _HAS_NEIGHBOUR: has_neighbour,
        _NEIGHBOUR: np.where(has_neighbour, cell(neighbour), 0),
        _FIRST_LIST: (microbatch * num_encoders + np.where(takes_own, encoder, 0)) * num_parts + part,
        _NUM_LISTS: np.where(takes_all, num_encoders * num_parts, takes_own),
        _SHARED: stages[stage, SHARED],
        _IS_FIRST: is_forward & (microbatch == 0),
        _NODE: stages[stage, FIRST_NODE] + part * num_replicas,
    }
    return np.column_stack([columns[number] for number in range(len(columns))]).astype(np.uint64)


@kernel
def walk(items, seconds, chain_s, messages, syncs, clocks, end_s, start_s):
    """Write the end of each cell to `end_s`, and the end of each worker's last computation to `clocks` [num_workers].

    `seconds` [2 (pass), num_cells] is the time of each computation, and `chain_s` [num_cells] that of the transfer to
    the next stage of the module or back from it. `syncs` are `SyncParts`: a node's first forward does not end before
    its parameters are gathered. `end_s` has the shape of `seconds`, and so has `start_s` unless it is empty. Replicas
    that share parameters end together; each is taken to wait for the slowest before it starts.
    """
    keeps_starts, gathers = start_s.size > 0, syncs.gathered_s.size > 0
    clocks[:] = 0.0
    for item in range(len(items)):
        which, first, dp, worker = items[item, _PASS], items[item, _CELL], items[item, _DP], items[item, _WORKER]
        span, before = items[item, _SPAN], items[item, _NEIGHBOUR]
        has_neighbour, num_lists = items[item, _HAS_NEIGHBOUR] > 0, items[item, _NUM_LISTS]
        shared, waits = items[item, _SHARED], gathers and items[item, _IS_FIRST] > 0
        # In forward, the transfer is that of the stage before; in backward, that of this stage.
        way = before if which == FORWARD else first
        if span == 1 and num_lists == 0 and shared == 1 and not keeps_starts and not waits:
            # By far most items: one loop.
            for replica in range(dp):
                ready_s = clocks[worker + replica]
                if has_neighbour:
                    ready_s = max(ready_s, end_s[which, before + replica] + chain_s[way + replica])
                ready_s += seconds[which, first + replica]
                end_s[which, first + replica] = ready_s
                clocks[worker + replica] = ready_s
            continue
        for replica in range(dp):
            ready_s = clocks[worker + replica * span]
            for lane in range(span):
                ready_s = max(ready_s, clocks[worker + replica * span + lane])
            if has_neighbour:
                ready_s = max(ready_s, end_s[which, before + replica] + chain_s[way + replica])
            end_s[which, first + replica] = ready_s
        for number in range(items[item, _FIRST_LIST], items[item, _FIRST_LIST] + num_lists):
            begin = messages.first[number]
            for entry in range(begin, begin + messages.count[number]):
                here, there = messages.target[entry], messages.source[entry]
                if which != FORWARD:
                    here, there = there, here
                end_s[which, here] = max(end_s[which, here], end_s[which, there] + messages.seconds[entry])
        if waits:
            for replica in range(dp):
                begin_s = syncs.gathered_s[items[item, _NODE] + replica] - seconds[which, first + replica]
                end_s[which, first + replica] = max(end_s[which, first + replica], begin_s)
        if shared > 1:
            for group in range(dp // shared):
                begin = group * shared
                ready_s, longest_s = 0.0, 0.0
                for replica in range(begin, begin + shared):
                    ready_s = max(ready_s, end_s[which, first + replica])
                    longest_s = max(longest_s, seconds[which, first + replica])
                for replica in range(begin, begin + shared):
                    end_s[which, first + replica] = ready_s + longest_s - seconds[which, first + replica]
        for replica in range(dp):
            if keeps_starts:
                start_s[which, first + replica] = end_s[which, first + replica]
            end_s[which, first + replica] += seconds[which, first + replica]
            for lane in range(span):
                clocks[worker + replica * span + lane] = end_s[which, first + replica]
