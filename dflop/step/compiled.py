"""A plan in the form that the simulator needs: the orders of all its stages, merged into one, the *total order*.

Which computation waits for which follows from the plan alone, so it is worked out once. In the total order every
computation stands after those that it waits for, whatever the times are. It is an order of stages, never of single
replicas: a plan for thousands of ranks compiles as fast as one for a few.

Messages have their place in it, too: behind the computation that makes them. All ranks issue their sends and receives
in this order (`instructions`). So it should be about the order in which computations end: a receive then begins before
its rank computes what ends later. Computations stand in the order of their ends, were each forward to take one unit of
time and each backward two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.step.nodes import stages_of
from dflop.step.orders import group_orders
from dflop.step.routes import track_of
from dflop.step.simulation_kernel import (
    BRIDGE_IN,
    BRIDGE_OUT,
    DP,
    FIRST_NODE,
    FIRST_WORKER,
    HAS_BACKWARD,
    NUM_COLUMNS,
    PARTS,
    SPAN,
    STAGE_BEFORE,
    STAGE_BEHIND,
    walk_items,
)
from dflop.step.slot_counts import SlotCounts, slot_counts

__all__ = ["AHEAD", "CompiledPlan", "compile_plan", "unmerged"]

# By how many microbatches a frozen encoder may be ahead of the stage that takes its output, in the total order, and
# features of any encoder of the LLM's first stage.
AHEAD = 4


@dataclass(frozen=True, kw_only=True)
class CompiledPlan:
    """`order` is [num_computations, 4]: pass, stage, microbatch, and the part of the stage's replicas that computes.

    `stages` is [num_stages, NUM_COLUMNS], with the columns of `walk`; `groups` [num_stages, 2] are the first list of
    computations that has a stage, and how many have it (`StageReplicas.group`); `ranks_of_worker` is [num_workers].
    """

    num_nodes: int
    num_workers: int
    num_microbatches: int
    num_encoders: int
    order: np.ndarray
    stages: np.ndarray
    groups: np.ndarray
    ranks_of_worker: np.ndarray

    @cached_property
    def items(self) -> np.ndarray:
        """The order as `walk` takes it, made on demand: for half of the plans that a search compiles, only the memory
        is needed."""
        return walk_items(self.order, self.stages, self.num_microbatches)

    @cached_property
    def slot_counts(self) -> SlotCounts:
        """How many slots ranks receive into on GPUs."""
        return slot_counts(self.order, self.stages, self.groups, self.num_microbatches, AHEAD)

    @cached_property
    def first_forwards(self) -> np.ndarray:
        """The first forward of each stage, in order: [num_first_forwards, 2] of stage, and the part of its replicas."""
        which, _, microbatch, _ = self.order.T
        return np.ascontiguousarray(self.order[(which == FORWARD) & (microbatch == 0)][:, [1, 3]])

    @cached_property
    def last_backwards(self) -> np.ndarray:
        """The last backward of each stage, in order: [num_last_backwards, 2] of stage, and the part of its replicas.
        Stages without a backward have none."""
        which, _, microbatch, _ = self.order.T
        is_last = (which == BACKWARD) & (microbatch == self.num_microbatches - 1)
        return np.ascontiguousarray(self.order[is_last][:, [1, 3]])


def compile_plan(plan: Plan, trained: TrainedSet = EVERYTHING, slots: np.ndarray | None = None) -> CompiledPlan:
    """Merge the orders of a plan's stages. Frozen encoders have no backward; `slots` as for `group_orders`."""
    listed = stages_of(plan)
    orders = group_orders(plan, trained, slots)
    stages = np.zeros((len(listed), NUM_COLUMNS), dtype=np.int64)
    encoders = [grid.module for grid in plan.grids[:-1]]
    has_bridges = PLACEMENTS[plan.placement].has_bridges and len(encoders) > 0
    for place, stage in enumerate(listed):
        is_first, is_last = stage.pp_stage == 0, stage.is_last
        is_llm = stage.module == "llm"
        stages[place] = (
            stage.dp,
            stage.first_node,
            stage.first_worker,
            stage.span,
            -1 if is_first else place - 1,
            -1 if is_last else place + 1,
            has_bridges and is_llm and is_first,
            encoders.index(stage.module) if has_bridges and not is_llm and is_last else -1,
            trained.has_backward(stage),
            plan.grid(stage.module).num_meeting,
            stage.num_groups if PLACEMENTS[plan.placement].fills_bubbles else 1,
            track_of(stage.pp_stage, plan.grid(stage.module).pp),
        )
    groups = np.array([(stage.group, stage.num_groups) for stage in listed], dtype=np.int64)
    offsets = np.cumsum([0, *(len(order) for order in orders)])
    num_distinct = sum(len(order) for order in orders)
    for place, stage in enumerate(listed):
        if stage.num_groups > stages[place, PARTS]:
            num_distinct -= (stage.num_groups - 1) * int((orders[stage.group][:, 1] == place).sum())
    merged, ends, num_merged = _merge(
        np.concatenate(orders), offsets, stages, groups, num_distinct, plan.num_microbatches
    )
    assert num_merged == num_distinct, "the orders wait for each other in a circle"
    merged = merged[np.argsort(ends, kind="stable")]
    last = stages[-1]
    num_workers = int((stages[:, FIRST_WORKER] + stages[:, DP] * stages[:, SPAN]).max())
    ranks_of_worker = np.zeros(num_workers, dtype=np.int64)
    for stage in listed:
        ranks_of_worker[stage.first_worker : stage.first_worker + stage.dp * stage.span] = stage.tp // stage.span
    return CompiledPlan(
        num_nodes=int(last[FIRST_NODE] + last[DP]),
        num_workers=num_workers,
        num_microbatches=plan.num_microbatches,
        num_encoders=len(encoders),
        order=merged,
        stages=stages,
        groups=groups,
        ranks_of_worker=ranks_of_worker,
    )


def unmerged(plan: CompiledPlan, orders: Sequence[np.ndarray]) -> CompiledPlan:
    """The plan with these orders of its groups one after the other, not merged.

    Each worker's own order is right, so that peak memory can be computed from the result, but no times.
    """
    rows = []
    for group, order in enumerate(orders):
        has_parts = plan.stages[order[:, 1], PARTS] > 1
        rows.append(np.column_stack([order, np.where(has_parts, group, 0)]))
    return replace(plan, order=np.concatenate(rows))


@kernel
def _merge(items, offsets, stages, groups, num_distinct, num_microbatches):
    """One order of all groups' computations, each after those that it waits for; when each ends, in units of a forward;
    and how many were placed.

    A stage in the lists of several groups either has one part for each group, each with its own place in the order, or
    one place for all groups. Every replica of an encoder is taken to feed every LLM replica, so that the order is right
    for every batch.
    """
    num_groups, num_stages = len(offsets) - 1, len(stages)
    merged, ends = np.empty((num_distinct, 4), dtype=np.int64), np.empty(num_distinct)
    done = np.zeros((2, num_stages, num_microbatches), dtype=np.int64)  # by how many parts
    ended = np.zeros((2, num_stages, num_microbatches))
    cursor, clocks = offsets[:-1].copy(), np.zeros(num_groups)
    count = 0
    moved = True
    while moved:
        moved = False
        for group in range(num_groups):
            while cursor[group] < offsets[group + 1]:
                which, stage, microbatch = items[cursor[group]]
                first, num_together, part = groups[stage, 0], groups[stage, 1], 0
                if stages[stage, PARTS] > 1:
                    first, num_together, part = group, 1, group - first
                ready = first == group
                for other in range(first, first + num_together):
                    if not ready or cursor[other] >= offsets[other + 1]:
                        ready = False
                        break
                    ready = (items[cursor[other]] == items[cursor[group]]).all()
                if not ready:
                    break
                end = _ready_at(which, stage, microbatch, stages, groups, done, ended)
                if end < 0.0:
                    break
                end = max(end, clocks[first : first + num_together].max()) + (1.0 if which == FORWARD else 2.0)
                merged[count], ends[count] = (which, stage, microbatch, part), end
                done[which, stage, microbatch] += 1
                ended[which, stage, microbatch] = max(ended[which, stage, microbatch], end)
                clocks[first : first + num_together] = end
                cursor[first : first + num_together] += 1
                count += 1
                moved = True
    return merged, ends, count


@kernel
def _ready_at(which, stage, microbatch, stages, groups, done, ended):
    """When all that a computation waits for has ended; negative where some of it is not placed yet."""
    ready = 0.0
    if which == FORWARD:
        neighbour, is_end = stages[stage, STAGE_BEFORE], stages[stage, BRIDGE_IN] > 0
    else:
        if not done[FORWARD, stage, microbatch]:
            return -1.0
        neighbour, is_end = stages[stage, STAGE_BEHIND], stages[stage, BRIDGE_OUT] >= 0
    if neighbour >= 0:
        if not done[which, neighbour, microbatch]:
            return -1.0
        ready = ended[which, neighbour, microbatch]
    for other in range(len(stages)):
        if is_end and (stages[other, BRIDGE_OUT] >= 0 if which == FORWARD else stages[other, BRIDGE_IN] > 0):
            num_parts = stages[other, PARTS] if which == FORWARD else 1
            if done[which, other, microbatch] < num_parts:
                return -1.0
            ready = max(ready, ended[which, other, microbatch])
    taker = _taker(stage, stages, groups)
    if not stages[stage, HAS_BACKWARD] and taker >= 0 and microbatch >= AHEAD:
        # Nothing else keeps a frozen encoder from running ahead, and its messages from piling up at their receivers.
        if not done[FORWARD, taker, microbatch - AHEAD]:
            return -1.0
        ready = max(ready, ended[FORWARD, taker, microbatch - AHEAD])
    return ready


@kernel
def _taker(stage, stages, groups):
    """The stage of another group that takes the output of this one; -1 where there is none."""
    taker = stages[stage, STAGE_BEHIND]
    if stages[stage, BRIDGE_OUT] >= 0:
        for other in range(len(stages)):
            if stages[other, BRIDGE_IN]:
                taker = other
    first, num_groups = groups[stage]
    return -1 if taker >= 0 and first <= groups[taker, 0] < first + num_groups else taker
