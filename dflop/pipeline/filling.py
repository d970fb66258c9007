"""Where in a batch's order encoders compute, in placements that fill bubbles with them: found greedily by their times.

A pipeline rank is busy with its LLM's computations in their schedule's order. Between them it computes its share of the
encoders: a forward while it would wait, or before the LLM where the first stage will need it soon; a backward whose
gradient has come while it would wait, and the rest at the end. This is event-driven list scheduling (Graham 1966), on
one replica of the pipeline with the mean times of all: every order that comes out of it can be carried out. Where to
draw the line between waiting and delaying is tried out, a few microseconds a try.

The result is slots, whole numbers (`placements.bubble_filled`). What they cost, and whether they pay, is for the
simulator to say, with all replicas.
"""

from collections.abc import Collection

import numpy as np

from dflop.parallelism.passes import BACKWARD, FORWARD
from dflop.parallelism.placements import PLACEMENTS
from dflop.parallelism.plan import Plan
from dflop.parallelism.schedules import SCHEDULES
from dflop.pipeline.compiled import CompiledPlan, unmerged
from dflop.pipeline.layout import stages_of
from dflop.pipeline.orders import group_orders, has_backward
from dflop.pipeline.simulate import StageTimes
from dflop.runtime.kernels import kernel

__all__ = ["BubbleFiller"]

# An encoder forward goes before the LLM's work when the rank is so many LLM computations, or fewer, from where the
# first stage needs it. While a rank would wait it begins one that delays the LLM by so many times the wait it fills.
# These pairs came within 0.1 % of the best of 36, in the mean over ten kinds of pipelines.
_TRIES = ((2, 1.0), (-2, 0.5), (6, 0.0), (0, 2.0), (0, 4.0), (-4, 1.0))
# In long pipelines bubbles are a smaller part of the step, and fewer pairs are tried: as many as simulate `_MOST_WORK`
# computations together, and at least `_FEWEST_TRIES`.
_MOST_WORK, _FEWEST_TRIES = 8192, 2
_NEVER = 1e30


class BubbleFiller:
    """Finds slots for batches of one plan, whose placement fills bubbles."""

    def __init__(self, plan: Plan, frozen: Collection[str] = ()) -> None:
        assert PLACEMENTS[plan.placement].fills_bubbles, f"{plan.placement} plans have one order for all batches"
        stages, schedule, llm = stages_of(plan), SCHEDULES[plan.schedule], plan.grid("llm")
        first = next(place for place, stage in enumerate(stages) if stage.module == "llm")
        self._encoders = [(stage, has_backward(stage.module, frozen)) for stage in stages[:first]]
        self._first_node, self._shape = stages[first].first_node, (len(stages) - first, llm.dp, plan.num_microbatches)
        orders = [order[order[:, 1] >= first] - [0, first, 0] for order in group_orders(plan, frozen)]
        self._plan, self._frozen = plan, tuple(frozen)
        self._items, self._offsets = np.concatenate(orders), np.cumsum([0, *map(len, orders)])
        self._needed_at = np.flatnonzero((orders[0][:, 0] == FORWARD) & (orders[0][:, 1] == 0))
        ahead = [
            min(schedule.ahead(stage, llm.pp, plan.num_microbatches, plan.num_chunks), len(orders[0]))
            for stage in range(llm.pp)
        ]
        # By how many computations a rank is behind the first one when both do the same microbatch's forward.
        self._behind = ahead[0] - np.array(ahead)

    @property
    def num_microbatches(self) -> int:
        return self._shape[-1]

    def least_held(self, compiled: CompiledPlan) -> CompiledPlan:
        """The plan in an order for `peak_bytes` alone, since ranks would wait for each other in a circle: encoders'
        forwards come as late as possible and their backwards as early, so that with any slots a rank holds no less."""
        num_ranks = len(self._offsets) - 1
        slots = np.empty((2, num_ranks, self.num_microbatches), dtype=np.int64)
        for rank in range(num_ranks):
            own = self._items[self._offsets[rank] : self._offsets[rank + 1]]
            in_first = own[:, 1] == rank  # the rank's first chunk
            slots[FORWARD, rank] = np.flatnonzero(in_first & (own[:, 0] == FORWARD))
            slots[BACKWARD, rank] = np.flatnonzero(in_first & (own[:, 0] == BACKWARD)) + 1
        return unmerged(compiled, group_orders(self._plan, self._frozen, slots))

    def slots(self, times: StageTimes, most_ahead: int) -> np.ndarray:
        """The best slots found, [2 (forward, backward), num_pipeline_ranks, num_microbatches].

        A rank holds about `most_ahead` microbatches of the encoders at a time, and only more where it has to.
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
        """What `_fill` takes but for its last three: lists, and times of the mean replica.

        LLM: seconds [3, num_stages, num_microbatches], and the way to the next stage. Encoders, of each pipeline rank:
        forwards, backwards and messages, [num_ranks, num_microbatches].
        """
        nodes = slice(self._first_node, None)
        weight_s = np.zeros_like(times.backward_s) if times.weight_s is None else times.weight_s
        llm_s = np.stack(
            [
                own[nodes].reshape(self._shape).mean(axis=1)
                for own in (times.forward_s, times.backward_s - weight_s, weight_s)
            ]
        )
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
    """Slots, and about how long the step takes with them.

    The rank that is free first decides what it does next. One that has nothing to do is passed over until what it may
    wait for has begun somewhere else.

    One long function: it is a loop over events whose whole state is in its variables.
    """
    num_ranks, num_microbatches = forward_s.shape
    slots = np.zeros((2, num_ranks, num_microbatches), dtype=np.int64)
    done = np.zeros((2, num_ranks), dtype=np.int64)  # of the encoders' forwards and backwards
    # When the LLM's passes end, and when all features of a microbatch are there, and from how many ranks so far.
    ends, features_s = np.full(llm_s.shape, _NEVER), np.zeros(num_microbatches)
    num_sent = np.zeros(num_microbatches, dtype=np.int64)
    clocks, cursor = np.zeros(num_ranks), offsets[:-1].copy()
    is_stuck, num_left = np.zeros(num_ranks, dtype=np.bool_), np.diff(offsets) + (1 + goes_back) * num_microbatches
    while num_left.max() > 0:
        rank, now = -1, _NEVER
        for other in range(num_ranks):
            if num_left[other] and not is_stuck[other] and clocks[other] < now:
                rank, now = other, clocks[other]
        is_forced = rank < 0  # All wait: somebody has to hold more than it should.
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
    """When the LLM's computation can begin; never, as long as what it waits for is not begun."""
    if which == FORWARD:
        if stage > 0:
            return ends[FORWARD, stage - 1, microbatch] + chain_s[stage - 1, microbatch]
        return features_s[microbatch] if num_sent[microbatch] == num_ranks else _NEVER
    if which == BACKWARD and stage < ends.shape[1] - 1:
        return ends[BACKWARD, stage + 1, microbatch] + chain_s[stage, microbatch]
    return 0.0  # its own rank has just done what it waits for


@kernel
def _wake(which, stage, rank, is_stuck):
    """Who may have waited for a pass of the LLM's: the next rank, or all whose gradients it makes."""
    num_ranks = len(is_stuck)
    if which == FORWARD:
        is_stuck[(rank + 1) % num_ranks] = False
    elif which == BACKWARD and stage > 0:
        is_stuck[(rank - 1) % num_ranks] = False
    elif which == BACKWARD:
        is_stuck[:] = False


@kernel
def _filler(now, llm_ready_s, back_ready_s, may_encode, must_encode, most_delay, forward_s, backward_s):
    """What the encoders do on a rank that may wait for its LLM: FORWARD, BACKWARD, or -1, wait."""
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
