"""Simulating a step again after a few of its cells have changed, exactly as `simulate` does it anew.

A column is what can only move together: a replica's stages and whatever shares their workers. Columns meet in bridges
alone. So only columns with a change are walked, from the first changed microbatch on, and the others join when a
message reaches them at another time and that makes a difference. What was overwritten is logged, to be taken back.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from dflop.pipeline.compiled import (
    BRIDGE_IN,
    BRIDGE_OUT,
    DP,
    FIRST_NODE,
    FIRST_WORKER,
    KIND,
    SPAN,
    SPLIT_BACKWARD,
    STAGE_BEFORE,
    STAGE_BEHIND,
    CompiledPlan,
)
from dflop.pipeline.passes import FORWARD, WEIGHT
from dflop.pipeline.simulate import per_worker

__all__ = ["CellTimes", "Clocks", "Network", "fresh_clocks", "mark", "network_of", "resimulate", "take_back"]


class Network(NamedTuple):
    """What waits for what. An operation is one replica's part of an item of the plan's order."""

    stages: np.ndarray
    items: np.ndarray  # [num_items, 5]: pass, stage, microbatch; the chain's and the bridge's items waited for, or -1
    first_operation: np.ndarray  # [num_items]: of replica 0; the others follow
    previous: np.ndarray  # [num_operations, most_workers]: what its workers do before, -1 for nothing
    last: np.ndarray  # [num_workers]: each worker's last operation, -1 for none
    worker_column: np.ndarray  # [num_workers]
    column: np.ndarray  # [num_nodes]
    column_starts: np.ndarray  # [num_columns + 1], into members
    members: np.ndarray  # [num_nodes, 2]: stage, replica
    first_item: np.ndarray  # [num_microbatches]
    sync_s: np.ndarray  # [num_workers]


class CellTimes(NamedTuple):
    """Seconds, as in `StageTimes`; a message of no encoder to a replica is negative."""

    forward_s: np.ndarray  # [num_nodes, num_microbatches]
    backward_s: np.ndarray
    weight_s: np.ndarray
    chain_s: np.ndarray
    message_s: np.ndarray  # [num_microbatches, num_encoder_replicas, num_llm_replicas]


class Clocks(NamedTuple):
    """When everything ends, and what the last call of `resimulate` did about it."""

    end_s: np.ndarray  # [num_operations]
    column_end_s: np.ndarray  # [num_columns], with gradient sync
    is_changed: np.ndarray  # [num_columns]
    num_changed: np.ndarray  # [num_stages]
    changed: np.ndarray  # [num_stages, most_replicas]
    reached: np.ndarray  # [most_replicas]
    logged: np.ndarray  # [num_operations]
    logged_s: np.ndarray
    num_logged: np.ndarray  # [1]


def network_of(plan: CompiledPlan, sync_s: np.ndarray) -> Network:
    """What every simulation of a plan shares; `sync_s` [num_nodes] as in `StageTimes`."""
    stages, order = plan.stages, plan.order
    place = np.full((3, len(stages), plan.num_microbatches), -1)
    place[order[:, 0], order[:, 1], order[:, 2]] = np.arange(len(order))
    is_forward = order[:, 0] == FORWARD
    neighbour = np.where(is_forward, stages[order[:, 1], STAGE_BEFORE], stages[order[:, 1], STAGE_BEHIND])
    has_bridge = np.where(is_forward, stages[order[:, 1], BRIDGE_IN], stages[order[:, 1], BRIDGE_OUT])
    bridge_to = np.where(is_forward, stages[:, BRIDGE_OUT].argmax(), stages[:, BRIDGE_IN].argmax())
    waits = order[:, 0] != WEIGHT
    sources = [
        np.where(waits & exists, place[order[:, 0], other, order[:, 2]], -1)
        for exists, other in ((neighbour >= 0, neighbour), (has_bridge > 0, bridge_to))
    ]
    replicas = stages[order[:, 1], DP]
    first_operation = np.cumsum(replicas) - replicas
    previous, last = _workers_orders(order, stages, first_operation, int(replicas.sum()), plan.num_workers)
    column, worker_column = _columns(stages, plan.num_nodes, plan.num_workers)
    members = np.array([(stage, replica) for stage, row in enumerate(stages) for replica in range(row[DP])])
    num_columns = int(column.max()) + 1
    return Network(
        stages=stages,
        items=np.column_stack([order, *sources]),
        first_operation=first_operation,
        previous=previous,
        last=last,
        worker_column=worker_column,
        column=column,
        column_starts=np.searchsorted(np.sort(column), np.arange(num_columns + 1)),
        members=members[np.argsort(column, kind="stable")],
        first_item=_first_items(order, plan.num_microbatches),
        sync_s=per_worker(stages, sync_s, plan.num_workers),
    )


def fresh_clocks(network: Network) -> Clocks:
    """Clocks of a step that has not been simulated yet: nothing in it is known."""
    num_operations, num_columns = len(network.previous), len(network.column_starts) - 1
    num_stages, most_replicas = len(network.stages), network.stages[:, DP].max()
    return Clocks(
        end_s=np.full(num_operations, -1.0),
        column_end_s=np.zeros(num_columns),
        is_changed=np.zeros(num_columns, dtype=np.bool_),
        num_changed=np.zeros(num_stages, dtype=np.int64),
        changed=np.zeros((num_stages, most_replicas), dtype=np.int64),
        reached=np.zeros(most_replicas, dtype=np.int64),
        logged=np.zeros(num_operations, dtype=np.int64),
        logged_s=np.zeros(num_operations),
        num_logged=np.zeros(1, dtype=np.int64),
    )


@njit(cache=True)
def _first_items(order, num_microbatches):
    first = np.full(num_microbatches, len(order))
    for item in range(len(order)):
        first[order[item, 2]] = min(first[order[item, 2]], item)
    return first


@njit(cache=True)
def _workers_orders(order, stages, first_operation, num_operations, num_workers):
    previous = np.full((num_operations, stages[:, SPAN].max()), -1)
    last = np.full(num_workers, -1)
    for item in range(len(order)):
        stage = order[item, 1]
        for replica in range(stages[stage, DP]):
            for lane in range(stages[stage, SPAN]):
                worker = stages[stage, FIRST_WORKER] + replica * stages[stage, SPAN] + lane
                previous[first_operation[item] + replica, lane] = last[worker]
                last[worker] = first_operation[item] + replica
    return previous, last


@njit(cache=True)
def _columns(stages, num_nodes, num_workers):
    """Which column each node and each worker belongs to, counted from 0."""
    # Labels spread over nodes that share a worker or a chain until none changes.
    node_label, worker_label = np.arange(num_nodes), np.full(num_workers, num_nodes)
    moved = True
    while moved:
        moved = False
        for stage in range(len(stages)):
            for replica in range(stages[stage, DP]):
                node = stages[stage, FIRST_NODE] + replica
                label = node_label[node]
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
    names = np.unique(node_label)
    return np.searchsorted(names, node_label), np.searchsorted(names, worker_label)


@njit(cache=True)
def mark(network, clocks, column):
    """From now on this column is walked."""
    if clocks.is_changed[column]:
        return
    clocks.is_changed[column] = True
    for place in range(network.column_starts[column], network.column_starts[column + 1]):
        stage = network.members[place, 0]
        clocks.changed[stage, clocks.num_changed[stage]] = network.members[place, 1]
        clocks.num_changed[stage] += 1


@njit(cache=True)
def resimulate(network, clocks, times, first_item):
    """The step in seconds. Columns that changed are `mark`ed, and nothing changed before `first_item` of the order."""
    # One long loop over local names: to hand a dozen arrays to a function costs more than what it would do.
    stages, items, first_operation, previous = network.stages, network.items, network.first_operation, network.previous
    column_of, starts, members = network.column, network.column_starts, network.members
    end_s, is_changed, changed, num_changed = clocks.end_s, clocks.is_changed, clocks.changed, clocks.num_changed
    logged, logged_s, reached = clocks.logged, clocks.logged_s, clocks.reached
    forward_s, backward_s, weight_s, chain_s = times.forward_s, times.backward_s, times.weight_s, times.chain_s
    message_s = times.message_s
    num_lanes = previous.shape[1]
    num_logged = 0
    for item in range(first_item, len(items)):
        which, stage, microbatch = items[item, 0], items[item, 1], items[item, 2]
        chain, bridge = items[item, 3], items[item, 4]
        first_node = stages[stage, FIRST_NODE]
        num_reached = 0
        if bridge < 0:
            num_reached = num_changed[stage]
            for place in range(num_reached):
                reached[place] = changed[stage, place]
        else:
            far = items[bridge, 1]
            for replica in range(stages[stage, DP]):
                is_reached = is_changed[column_of[first_node + replica]]
                for place in range(num_changed[far]):
                    if is_reached:
                        break
                    other = changed[far, place]
                    if which == FORWARD:
                        is_reached = message_s[microbatch, other, replica] >= 0.0
                    else:
                        is_reached = message_s[microbatch, replica, other] >= 0.0
                if is_reached:
                    reached[num_reached] = replica
                    num_reached += 1
        for place in range(num_reached):
            replica = reached[place]
            node, operation = first_node + replica, first_operation[item] + replica
            ready_s = 0.0
            for lane in range(num_lanes):
                if previous[operation, lane] >= 0:
                    ready_s = max(ready_s, end_s[previous[operation, lane]])
            if chain >= 0:
                sender = stages[items[chain, 1], FIRST_NODE] + replica if which == FORWARD else node
                ready_s = max(ready_s, end_s[first_operation[chain] + replica] + chain_s[sender, microbatch])
            if bridge >= 0:
                first = first_operation[bridge]
                for other in range(stages[items[bridge, 1], DP]):
                    if which == FORWARD:
                        seconds = message_s[microbatch, other, replica]
                    else:
                        seconds = message_s[microbatch, replica, other]
                    if seconds >= 0.0:
                        ready_s = max(ready_s, end_s[first + other] + seconds)
            if which == FORWARD:
                ready_s += forward_s[node, microbatch]
            elif which == WEIGHT:
                ready_s += weight_s[node, microbatch]
            elif stages[stage, KIND] == SPLIT_BACKWARD:
                ready_s += backward_s[node, microbatch] - weight_s[node, microbatch]
            else:
                ready_s += backward_s[node, microbatch]
            if ready_s == end_s[operation]:
                continue
            logged[num_logged], logged_s[num_logged] = operation, end_s[operation]
            num_logged += 1
            end_s[operation] = ready_s
            column = column_of[node]
            if not is_changed[column]:
                is_changed[column] = True
                for member in range(starts[column], starts[column + 1]):
                    its_stage = members[member, 0]
                    changed[its_stage, num_changed[its_stage]] = members[member, 1]
                    num_changed[its_stage] += 1
    clocks.num_logged[0] = num_logged
    is_changed[:] = False
    num_changed[:] = 0
    column_end_s = clocks.column_end_s
    column_end_s[:] = 0.0
    for worker in range(len(network.last)):
        worker_end_s = network.sync_s[worker]
        if network.last[worker] >= 0:
            worker_end_s += end_s[network.last[worker]]
        column = network.worker_column[worker]
        column_end_s[column] = max(column_end_s[column], worker_end_s)
    return column_end_s.max()


@njit(cache=True)
def take_back(clocks):
    """Undo what the last `resimulate` wrote to the ends of operations."""
    for place in range(clocks.num_logged[0]):
        clocks.end_s[clocks.logged[place]] = clocks.logged_s[place]
