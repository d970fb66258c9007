"""How many slots of memory a rank of a GPU receives into (`receiving.Slots`), from the total order alone.

A receive begins at the place of its message in the total order, and its slot is free once the computation that takes
the message is issued. So the number of slots follows from the order, as if there were every message. All ranks with the
same list of computations have the same number, whatever the number of ranks.
"""

from typing import NamedTuple

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import FORWARD
from dflop.step.simulation_kernel import BRIDGE_IN, BRIDGE_OUT, HAS_BACKWARD, PARTS, STAGE_BEFORE, STAGE_BEHIND

__all__ = ["SlotCounts", "slot_counts"]

_STATES, _STATE_GRADIENTS, _FEATURES, _FEATURE_GRADIENTS = range(4)


class SlotCounts(NamedTuple):
    """Slots of each list of computations (`StageReplicas.group`), by what is received into them; [num_groups] each.

    A slot holds the messages of one operation: for example, one microbatch's features from three encoder ranks.
    """

    states: np.ndarray
    state_gradients: np.ndarray
    features: np.ndarray
    feature_gradients: np.ndarray


def slot_counts(
    order: np.ndarray, stages: np.ndarray, groups: np.ndarray, num_microbatches: int, ahead: int
) -> SlotCounts:
    """The slots of a plan with these `order`, `stages` and `groups` (`CompiledPlan`). Features are not sent before the
    forward of the microbatch `ahead` before on the stage that takes them."""
    return SlotCounts(*_count(order, stages, groups, num_microbatches, ahead).T)


@kernel
def _count(order, stages, groups, num_microbatches, ahead):
    """The number of slots, [num_groups, 4]."""
    num_groups = (groups[:, 0] + groups[:, 1]).max()
    counts, free = np.zeros((num_groups, 4), dtype=np.int64), np.zeros((num_groups, 4), dtype=np.int64)
    llm = 0  # the stage that takes features
    num_takers = np.zeros(num_groups, dtype=np.int64)  # encoders that take gradients of features
    for stage in range(len(stages)):
        if stages[stage, BRIDGE_IN] > 0:
            llm = stage
        if stages[stage, BRIDGE_OUT] >= 0 and stages[stage, HAS_BACKWARD] > 0:
            num_takers[groups[stage, 0] : groups[stage, 0] + groups[stage, 1]] += 1
    is_forwarded = np.zeros(num_microbatches + ahead, dtype=np.bool_)
    is_forwarded[:ahead] = True  # the microbatch `ahead` before, by the stage that takes features
    num_held, num_sent = np.zeros(num_microbatches + ahead), np.zeros(num_microbatches)
    num_left = np.zeros((num_groups, num_microbatches), dtype=np.int64)
    for item in range(len(order)):
        which, stage, microbatch, part = order[item]
        first, last = groups[stage, 0], groups[stage, 0] + groups[stage, 1]
        if stages[stage, PARTS] > 1:
            first, last = first + part, first + part + 1
        is_forward, own = which == FORWARD, stages[stage]
        before, behind, hidden = own[STAGE_BEFORE], own[STAGE_BEHIND], _STATES
        if not is_forward:
            before, behind, hidden = behind, before, _STATE_GRADIENTS
        if before >= 0:
            free[first:last, hidden] += 1
        if is_forward and own[BRIDGE_IN] > 0:
            free[first, _FEATURES] += num_sent[microbatch]
            is_forwarded[microbatch + ahead] = True
            if num_held[microbatch + ahead] > 0:
                num_sent[microbatch + ahead] += 1
                _take(counts, free, first, _FEATURES)
        if not is_forward and own[BRIDGE_OUT] >= 0:
            for group in range(first, last):
                num_left[group, microbatch] -= 1
                free[group, _FEATURE_GRADIENTS] += num_left[group, microbatch] == 0
        if behind >= 0 and (is_forward or stages[behind, HAS_BACKWARD] > 0):
            for group in range(groups[behind, 0], groups[behind, 0] + groups[behind, 1]):
                _take(counts, free, group, hidden)
        if is_forward and own[BRIDGE_OUT] >= 0:
            if is_forwarded[microbatch]:
                num_sent[microbatch] += 1
                _take(counts, free, groups[llm, 0], _FEATURES)
            else:
                num_held[microbatch] += 1
        if not is_forward and own[BRIDGE_IN] > 0:
            for group in range(num_groups):
                if num_takers[group] > 0:
                    num_left[group, microbatch] = num_takers[group]
                    _take(counts, free, group, _FEATURE_GRADIENTS)
    return counts


@kernel
def _take(counts, free, group, kind):
    """Receive into a slot that is free. A channel has two at least."""
    if free[group, kind] > 0 and counts[group, kind] > 1:
        free[group, kind] -= 1
    else:
        counts[group, kind] += 1
