"""Where encoders compute in a batch's order, in placements that fill pipeline bubbles with them: a greedy search.

A pipeline rank does its LLM computations in their schedule's order. Between them it computes its share of the encoders:
a forward while it would wait, or before LLM work where the first stage will soon need the features; a backward while it
would wait and the gradient is there; and the remaining backwards at the end. This is event-driven list scheduling
(Graham 1966), on one replica of the pipeline with the mean times of all replicas. So every order that it finds can be
executed. How long the LLM may be delayed by an encoder is tried out, at a few microseconds a try.

The result is an array of slots (`placements.bubble_filled`). Step times with these slots and all replicas come from the
simulator.
"""

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan
from dflop.plan.schedules import SCHEDULES
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.step.compiled import CompiledPlan, unmerged
from dflop.step.nodes import stages_of
from dflop.step.orders import group_orders
from dflop.step.simulate import StageTimes

__all__ = ["BubbleFiller"]

# Pairs (lead, most_delay). An encoder forward goes before LLM work when at most `lead` LLM computations are left until
# the first stage needs it. A rank that would wait starts an encoder computation if this delays the LLM by at most
# `most_delay` times the wait. These pairs came within 0.1 % of the best of 36, in the mean over ten kinds of pipelines.
_TRIES = ((2, 1.0), (-2, 0.5), (6, 0.0), (0, 2.0), (0, 4.0), (-4, 1.0))
# With many computations, bubbles are a smaller part of the step, and fewer pairs are tried: as many as simulate
# `_MOST_WORK` computations together, and at least `_FEWEST_TRIES`.
_MOST_WORK, _FEWEST_TRIES = 8192, 2
_NEVER = 1e30


class BubbleFiller:
    """Finds slots for batches of one plan, with a placement that fills bubbles."""

    def __init__(self, plan: Plan, trained: TrainedSet = EVERYTHING) -> None:
        assert PLACEMENTS[plan.placement].fills_bubbles, f"{plan.placement} plans have one order for all batches"
        stages, schedule, llm = stages_of(plan), SCHEDULES[plan.schedule], plan.grid("llm")
        first = next(place for place, stage in enumerate(stages) if stage.module == "llm")
        self._encoders = [(stage, trained.has_backward(stage)) for stage in stages[:first]]
        self._first_node, self._shape = stages[first].first_node, (len(stages) - first, llm.dp, plan.num_microbatches)
        orders = [order[order[:, 1] >= first] - [0, first, 0] for order in group_orders(plan, trained)]
        self._plan, self._trained = plan, trained
        self._items, self._offsets = np.concatenate(orders), np.cumsum([0, *map(len, orders)])
        self._needed_at = np.flatnonzero((orders[0][:, 0] == FORWARD) & (orders[0][:, 1] == 0))
        ahead = [
            min(schedule.ahead(stage, llm.pp, plan.num_microbatches, plan.num_chunks), len(orders[0]))
            for stage in range(llm.pp)
        ]
        # How many computations fewer than the first rank a rank has done when both do the same microbatch's forward.
        self._behind = ahead[0] - np.array(ahead)

    @property
    def num_microbatches(self) -> int:
        return self._shape[-1]

    def least_held(self, compiled: CompiledPlan) -> CompiledPlan:
        """The plan in an order with a lower bound of each rank's peak memory over all slots.

        Encoders' forwards come as late as possible and their backwards as early as possible. The order is for
        `peak_bytes` only: executed, its ranks would wait for each other in a circle.
        """
        num_ranks = len(self._offsets) - 1
        slots = np.empty((2, num_ranks, self.num_microbatches), dtype=np.int64)
        for rank in range(num_ranks):
            own = self._items[self._offsets[rank] : self._offsets[rank + 1]]
            in_first = own[:, 1] == rank  # the rank's first chunk
            slots[FORWARD, rank] = np.flatnonzero(in_first & (own[:, 0] == FORWARD))
            slots[BACKWARD, rank] = np.flatnonzero(in_first & (own[:, 0] == BACKWARD)) + 1
        return unmerged(compiled, group_orders(self._plan, self._trained, slots))

    def slots(self, times: StageTimes, most_ahead: int) -> np.ndarray:
        """The best slots found, [2 (forward, backward), num_pipeline_ranks, num_microbatches].

        A rank holds the encoders' activations of about `most_ahead` microbatches at a time, and of more only where all
        ranks would wait otherwise.
        """
        problem = self._reduced(times)
        best, best_s = None, np.inf
        num_tries = _MOST_WORK // (2 * len(self._items))
        for lead, delay in _TRIES[: max(_FEWEST_TRIES, num_tries)]:
            slots, step_s = _fill(*problem, lead, delay, most_ahead)
            if step_s < best_s:
                best, best_s = slots, step_s
        assert best is not None, "what no rank waits for can always be computed"
        return best

    def _reduced(self, times: StageTimes) -> tuple:
        """The arguments of `_fill` without the last three: the LLM's orders, and seconds of the mean replica.

        For the LLM: computations [2, num_stages, num_microbatches], and transfers to the next stage [num_stages,
        num_microbatches]. For the encoders on each pipeline rank: forwards, backwards and messages, each [num_ranks,
        num_microbatches].
        """
        nodes = slice(self._first_node, None)
        llm_s = np.stack([own[nodes].reshape(self._shape).mean(axis=1) for own in (times.forward_s, times.backward_s)])
        chain_s = times.chain_s[nodes].reshape(self._shape).mean(axis=1)
        num_ranks = len(self._offsets) - 1
        forward_s, backward_s, message_s = np.zeros((3, num_ranks, self.num_microbatches))
        for stage, goes_back in self._encoders:
            own = slice(stage.first_node, stage.first_node + stage.dp)
            shape = (num_ranks, stage.dp // num_ranks, self.num_microbatches)
            forward_s += times.forward_s[own].reshape(shape).mean(axis=1)
            if goes_back:
                backward_s += times.backward_s[own].reshape(shape).mean(axis=1)
            bridges = times.bridges
            sent = (bridges.source >= own.start) & (bridges.source < own.stop)
            rank = (bridges.source[sent] - own.start) * num_ranks // stage.dp
            np.maximum.at(message_s, (rank, bridges.microbatch[sent]), bridges.seconds[sent])
        goes_back = any(goes_back for _, goes_back in self._encoders)
        return (
            self._items, self._offsets, self._needed_at, self._behind,
            llm_s, chain_s, forward_s, backward_s, message_s, goes_back,
        )  # fmt: skip


@kernel
def _fill(
    items, offsets, needed_at, behind, llm_s, chain_s, forward_s, backward_s, message_s, goes_back,
    lead, most_delay, most_ahead,
):  # fmt: skip
    """Slots, and an estimate of the step time with them in seconds.

    In each round, the rank that is free first decides what it does next. A rank that has nothing to do is left out
    until another rank begins a computation that it may wait for.

    This is one long function because it is a loop over events with all of its state in local variables.
    """
    num_ranks, num_microbatches = forward_s.shape
    slots = np.zeros((2, num_ranks, num_microbatches), dtype=np.int64)
    done = np.zeros((2, num_ranks), dtype=np.int64)  # of the encoders' forwards and backwards
    # When each of the LLM's passes ends; when all features of a microbatch are there, and from how many ranks so far.
    ends, features_s = np.full(llm_s.shape, _NEVER), np.zeros(num_microbatches)
    num_sent = np.zeros(num_microbatches, dtype=np.int64)
    clocks, cursor = np.zeros(num_ranks), offsets[:-1].copy()
    is_stuck, num_left = np.zeros(num_ranks, dtype=np.bool_), np.diff(offsets) + (1 + goes_back) * num_microbatches
    while num_left.max() > 0:
        rank, now = -1, _NEVER
        for other in range(num_ranks):
            if num_left[other] and not is_stuck[other] and clocks[other] < now:
                rank, now = other, clocks[other]
        is_forced = rank < 0  # All ranks are stuck: one has to hold more than `most_ahead` microbatches.
        if is_forced:
            rank = done[FORWARD].argmin()
            assert done[FORWARD, rank] < num_microbatches, "the LLM's orders wait for each other in a circle"
            now = clocks[rank]
        forward, backward = done[FORWARD, rank], done[BACKWARD, rank]
        place, has_llm = cursor[rank] - offsets[rank], cursor[rank] < offsets[rank + 1]
        llm_ready_s = _NEVER
        if has_llm:
            which, stage, microbatch = items[cursor[rank]]
            llm_ready_s = _ready_s(which, stage, microbatch, chain_s, ends, features_s, num_sent, num_ranks)
        back_ready_s = _NEVER
        if backward < forward and goes_back:
            back_ready_s = ends[BACKWARD, 0, backward] + message_s[rank, backward]
        has_room = forward - backward < most_ahead or not goes_back
        is_urgent = forward < num_microbatches and needed_at[forward] - behind[rank] - lead <= place
        must_encode = is_forced or (is_urgent and has_room)
        makes_room = is_urgent and not has_room and back_ready_s <= now
        if has_llm and llm_ready_s <= now and not must_encode and not makes_room:
            clocks[rank] = now + llm_s[which, stage, microbatch]
            ends[which, stage, microbatch] = clocks[rank]
            cursor[rank] += 1
            _wake(which, stage, rank, is_stuck)
        else:
            way = BACKWARD
            if not makes_room:
                way = _filler(
                    now, llm_ready_s, back_ready_s, forward < num_microbatches and has_room, must_encode, most_delay,
                    forward_s[rank, min(forward, num_microbatches - 1)],
                    backward_s[rank, min(backward, num_microbatches - 1)],
                )  # fmt: skip
            if way < 0:
                clocks[rank] = llm_ready_s if back_ready_s <= now else min(llm_ready_s, back_ready_s)
                is_stuck[rank] = clocks[rank] >= _NEVER
                if is_stuck[rank]:
                    clocks[rank] = now
                continue
            slots[way, rank, done[way, rank]] = place
            clocks[rank] = now + (forward_s if way == FORWARD else backward_s)[rank, done[way, rank]]
            done[way, rank] += 1
            if way == FORWARD:
                features_s[forward] = max(features_s[forward], clocks[rank] + message_s[rank, forward])
                num_sent[forward] += 1
                is_stuck[0] = False
        num_left[rank] -= 1
    return slots, clocks.max()


@kernel
def _ready_s(which, stage, microbatch, chain_s, ends, features_s, num_sent, num_ranks):
    """When the LLM's computation can begin; `_NEVER` while a computation that it waits for has not begun."""
    if which == FORWARD:
        if stage > 0:
            return ends[FORWARD, stage - 1, microbatch] + chain_s[stage - 1, microbatch]
        return features_s[microbatch] if num_sent[microbatch] == num_ranks else _NEVER
    if stage < ends.shape[1] - 1:
        return ends[BACKWARD, stage + 1, microbatch] + chain_s[stage, microbatch]
    return 0.0  # its rank has already done everything that it waits for


@kernel
def _wake(which, stage, rank, is_stuck):
    """Clear `is_stuck` of the ranks that may wait for this pass of the LLM: the next rank in the pass's direction, or,
    after the first stage's backward, all ranks."""
    num_ranks = len(is_stuck)
    if which == FORWARD:
        is_stuck[(rank + 1) % num_ranks] = False
    elif stage > 0:
        is_stuck[(rank - 1) % num_ranks] = False
    else:
        is_stuck[:] = False


@kernel
def _filler(now, llm_ready_s, back_ready_s, may_encode, must_encode, most_delay, forward_s, backward_s):
    """What the encoders do on a rank whose LLM computation may have to wait: FORWARD, BACKWARD, or -1 for nothing."""
    if must_encode:
        return FORWARD
    has_gradient = back_ready_s <= now
    if not may_encode and not has_gradient:
        return -1
    way = FORWARD if may_encode else BACKWARD
    if llm_ready_s >= _NEVER:
        return way
    wait_s = llm_ready_s - now
    if may_encode and has_gradient and abs(backward_s - wait_s) < abs(forward_s - wait_s):
        way = BACKWARD
    takes_s = forward_s if way == FORWARD else backward_s
    return way if takes_s - wait_s <= most_delay * wait_s else -1
