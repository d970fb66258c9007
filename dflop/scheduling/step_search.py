"""Descent on the simulated step time: samples and microbatches change places while the pipeline gets faster by it.

A trial changes a few cells: it swaps two samples, moves one, swaps two buckets of a replica or two microbatches of all,
or gives a sample's media to another encoder replica. Only the changed cells are priced again, and the step is
simulated anew (tens of microseconds). It may be stopped after any number of trials; they are drawn from a seed, so
that equal questions have equal answers.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from dflop.balancing import NO_CAP
from dflop.costs.forms import PackedForms, form_at, pack_forms
from dflop.data import SampleShapes
from dflop.pipeline import (
    PLACEMENTS,
    SCHEDULES,
    CellTimes,
    CompiledPlan,
    fresh_clocks,
    mark,
    network_of,
    resimulate,
    take_back,
)
from dflop.pricing import WEIGHT_SHARE, Assignment, Pricer, bin_of

__all__ = ["StepSearch", "stage_forms"]

# Beside the step, which the slowest column sets, the mean of the columns' ends counts a little: what brings a fast
# one forward makes room for the next change.
MEAN_SHARE = 0.05
# How often a trial starts from what ends last, and how many samples are drawn to find one there.
FOCUS = 0.5
MOST_DRAWS = 200
_SWAP, _MOVE, _SWAP_BUCKETS, _SWAP_MICROBATCHES, _MOVE_MEDIA = range(5)
_SHARES = np.cumsum([0.5, 0.2, 0.14, 0.08, 0.08])


class StageForms(NamedTuple):
    """A plan's stages as the kernel wants them; their times are to be multiplied by their shape bin's factor."""

    stages: np.ndarray  # as in `CompiledPlan`
    is_llm: np.ndarray  # [num_stages]
    first_nodes: tuple[int, int]  # of the encoder and of the LLM
    forward: PackedForms
    backward: PackedForms
    # [2 (encoder, LLM), 2 (forward, backward), num_load_bins, num_segment_bins]; None, for which the kernel is compiled
    # without corrections, where there are none.
    factors: np.ndarray | None
    weight_share: np.ndarray  # [num_nodes]
    chain_latency_s: np.ndarray  # [num_nodes]
    chain_token_s: np.ndarray
    bridge_latency_s: np.ndarray  # [num_encoders, num_llm_replicas]
    bridge_token_s: np.ndarray
    has_bridges: bool
    sends_text: bool
    max_bucket_tokens: int


class _State(NamedTuple):
    """An assignment, and what follows from it."""

    place: np.ndarray  # [num_samples, 3]: LLM replica, microbatch, encoder replica
    text: np.ndarray  # loads [num_llm_replicas, num_microbatches, 4]
    media: np.ndarray  # loads [num_encoders, num_microbatches, 4]
    features: np.ndarray  # tokens [num_microbatches, num_encoders, num_llm_replicas]
    message_s: np.ndarray  # of the same shape, negative where there is none
    count: np.ndarray  # samples [num_llm_replicas, num_microbatches]
    forward_s: np.ndarray  # [1, num_nodes, num_microbatches]
    backward_s: np.ndarray
    weight_s: np.ndarray
    chain_s: np.ndarray
    stamps: np.ndarray  # [1]: number of the last change; below, that of the last one for which a cell was priced
    text_stamp: np.ndarray  # [num_llm_replicas, num_microbatches]
    media_stamp: np.ndarray  # [num_encoders, num_microbatches]


class StepSearch:
    """Improves assignments of one batch to one plan."""

    def __init__(self, pricer: Pricer, shapes: SampleShapes, max_bucket_tokens: int | None) -> None:
        """`max_bucket_tokens` is never exceeded by a change; None for no limit."""
        max_bucket_tokens = NO_CAP if max_bucket_tokens is None else max_bucket_tokens
        self._pricer, self._shapes = pricer, shapes
        self._plan = stage_forms(pricer, max_bucket_tokens)
        self._network = network_of(pricer.compiled, pricer.sync_s)
        assert len(shapes.encoders) == 1, "a sample's media have one place"
        tokens = shapes.llm_tokens.astype(float)
        self._loads = np.column_stack([shapes.num_items[:, 0], tokens, tokens**2, shapes.target_tokens]).astype(float)
        self._kept = shapes.kept_tokens[:, 0].astype(float)

    def improve(self, assignment: Assignment, num_trials: int, seed: int) -> tuple[Assignment, float]:
        """The best assignment met in so many trials, and its step in seconds; no worse than the given one."""
        shape = self._plan.bridge_token_s.shape
        places = [assignment.llm_dp_rank, assignment.microbatch, assignment.encoder_rank[:, 0]]
        best, step_s = _descend_on_step(
            self._plan,
            self._network,
            fresh_clocks(self._network),
            _new_state(np.column_stack(places).astype(np.int64), *shape, self._pricer.compiled),
            self._loads,
            self._kept,
            num_trials,
            seed,
        )
        rank, microbatch, encoder = np.ascontiguousarray(best.T)
        return Assignment(llm_dp_rank=rank, microbatch=microbatch, encoder_rank=encoder[:, None]), float(step_s)

    def step_s(self, assignment: Assignment) -> float:
        """As `Pricer.step_s` has it."""
        return self.improve(assignment, 0, 0)[1]


def _new_state(place: np.ndarray, num_encoders: int, num_replicas: int, compiled: CompiledPlan) -> _State:
    """Of samples at these places [num_samples, 3]; the kernel works out the rest."""
    num_microbatches = compiled.num_microbatches
    return _State(
        place=place,
        text=np.zeros((num_replicas, num_microbatches, 4)),
        media=np.zeros((num_encoders, num_microbatches, 4)),
        features=np.zeros((num_microbatches, num_encoders, num_replicas)),
        message_s=np.zeros((num_microbatches, num_encoders, num_replicas)),
        count=np.zeros((num_replicas, num_microbatches), dtype=np.int64),
        stamps=np.zeros(1, dtype=np.int64),
        text_stamp=np.zeros((num_replicas, num_microbatches), dtype=np.int64),
        media_stamp=np.zeros((num_encoders, num_microbatches), dtype=np.int64),
        **{name: np.zeros((1, compiled.num_nodes, num_microbatches)) for name in _TIMES},
    )


_TIMES = ("forward_s", "backward_s", "weight_s", "chain_s")


def stage_forms(pricer: Pricer, max_bucket_tokens: int) -> StageForms:
    plan = pricer.plan
    forward, backward = (pack_forms(forms) for forms in pricer.stage_costs.time_forms())
    links, corrections = pricer.transfers.forms(), pricer.corrections
    is_llm = np.array([stage.module == "llm" for stage in pricer.stages])
    return StageForms(
        stages=pricer.compiled.stages,
        is_llm=is_llm,
        first_nodes=(0, pricer.stages[int(is_llm.argmax())].first_node),
        forward=forward,
        backward=backward,
        factors=np.stack([corrections.table(grid.module) for grid in plan.grids]) if corrections.factors else None,
        weight_share=WEIGHT_SHARE * pricer.trains * SCHEDULES[plan.schedule].splits_backward,
        has_bridges=PLACEMENTS[plan.placement].has_bridges,
        sends_text=plan.num_stages("llm") > 1,
        max_bucket_tokens=max_bucket_tokens,
        chain_latency_s=links.chain_latency_s,
        chain_token_s=links.chain_byte_s * pricer.bytes_per_token,
        bridge_latency_s=links.bridge_latency_s,
        bridge_token_s=links.bridge_byte_s * pricer.bytes_per_token,
    )


@njit(cache=True)
def _descend_on_step(plan, network, clocks, state, loads, kept, num_trials, seed):
    """The best of the assignments met [num_samples, 3] (LLM replica, microbatch, encoder replica), and its step."""
    np.random.seed(seed)
    num_samples = len(kept)
    num_microbatches = state.count.shape[1]
    for sample in range(num_samples):
        _put(state, loads, kept, sample, 1.0)
    for microbatch in range(num_microbatches):
        for replica in range(len(state.text)):
            _price_text(plan, state, replica, microbatch)
        for replica in range(len(state.media)):
            _price_media(plan, state, replica, microbatch)
            for other in range(len(state.text)):
                _price_message(plan, state, microbatch, replica, other)
    _correct(plan.factors, plan, state, state.place, state.place, num_samples)
    times = CellTimes(state.forward_s[0], state.backward_s[0], state.weight_s[0], state.chain_s[0], state.message_s)
    for column in range(len(clocks.column_end_s)):
        mark(network, clocks, column)
    best_s = resimulate(network, clocks, times, 0)
    best = state.place.copy()
    now_s, latest = _goal(clocks)
    changed = np.empty(num_samples, dtype=np.int64)
    before, after = np.empty((num_samples, 3), dtype=np.int64), np.empty((num_samples, 3), dtype=np.int64)
    for _ in range(num_trials):
        kind = np.searchsorted(_SHARES, np.random.random())
        num_changed = _propose(plan, network, state, loads, kept, kind, latest, changed, before, after)
        if num_changed == 0:
            continue
        _apply(plan, state, loads, kept, changed, before, after, num_changed)
        first_item = _mark_changed(plan, network, clocks, before, after, num_changed)
        step_s = resimulate(network, clocks, times, first_item)
        goal_s, its_latest = _goal(clocks)
        if goal_s <= now_s:
            now_s, latest = goal_s, its_latest
            if step_s < best_s:
                best_s = step_s
                best[:] = state.place
            continue
        take_back(clocks)
        _apply(plan, state, loads, kept, changed, after, before, num_changed)
    return best, best_s


@njit(cache=True)
def _goal(clocks):
    """The step with a share of the columns' mean end; and the column that ends last."""
    latest = clocks.column_end_s.argmax()
    return clocks.column_end_s[latest] + MEAN_SHARE * clocks.column_end_s.mean(), latest


@njit(cache=True)
def _propose(plan, network, state, loads, kept, kind, latest, changed, before, after):
    """Draw a change of this kind: how many samples it concerns (0: none is possible), and their places."""
    num_samples = len(kept)
    num_replicas, num_microbatches = state.count.shape
    sample = _draw_sample(plan, network, state, latest)
    rank, microbatch = state.place[sample, 0], state.place[sample, 1]
    changed[0] = sample
    before[0], after[0] = state.place[sample], state.place[sample]
    num_changed = 1
    if kind == _SWAP:
        other = np.random.randint(num_samples)
        if state.place[other, 0] == rank and state.place[other, 1] == microbatch:
            return 0
        shift = loads[other, 1] - loads[sample, 1]
        if (
            state.text[rank, microbatch, 1] + shift > plan.max_bucket_tokens
            or state.text[state.place[other, 0], state.place[other, 1], 1] - shift > plan.max_bucket_tokens
        ):
            return 0
        changed[1] = other
        before[1], after[1] = state.place[other], state.place[other]
        after[0, :2], after[1, :2] = state.place[other, :2], state.place[sample, :2]
        num_changed = 2
    elif kind == _MOVE:
        to_rank, to_microbatch = np.random.randint(num_replicas), np.random.randint(num_microbatches)
        if (to_rank == rank and to_microbatch == microbatch) or state.count[rank, microbatch] == 1:
            return 0
        if state.text[to_rank, to_microbatch, 1] + loads[sample, 1] > plan.max_bucket_tokens:
            return 0
        after[0, 0], after[0, 1] = to_rank, to_microbatch
    elif kind == _MOVE_MEDIA:
        if len(state.media) == 1 or kept[sample] == 0.0 or not plan.has_bridges:
            return 0
        after[0, 2] = np.random.randint(len(state.media))
    else:
        to_microbatch = np.random.randint(num_microbatches)
        if to_microbatch == microbatch:
            return 0
        num_changed = 0
        for own in range(num_samples):
            its_microbatch = state.place[own, 1]
            if kind == _SWAP_BUCKETS and state.place[own, 0] != rank:
                continue
            if its_microbatch in (microbatch, to_microbatch):
                changed[num_changed] = own
                before[num_changed], after[num_changed] = state.place[own], state.place[own]
                after[num_changed, 1] = to_microbatch if its_microbatch == microbatch else microbatch
                num_changed += 1
    if not plan.has_bridges:
        after[:num_changed, 2] = after[:num_changed, 0]
    return num_changed


@njit(cache=True)
def _draw_sample(plan, network, state, latest):
    """Any sample, or one of the column that ends last: what leaves others as they are cannot shorten the step."""
    num_samples = len(state.place)
    sample = np.random.randint(num_samples)
    if np.random.random() < FOCUS:
        first_encoder, first_llm = plan.first_nodes
        for _ in range(MOST_DRAWS):
            if (
                network.column[first_llm + state.place[sample, 0]] == latest
                or network.column[first_encoder + state.place[sample, 2]] == latest
            ):
                break
            sample = np.random.randint(num_samples)
    return sample


@njit(cache=True)
def _apply(plan, state, loads, kept, changed, before, after, num_changed):
    """Take samples from where they were to where they shall be, and price the cells they left and came to, once."""
    place, stamps, text_stamp, media_stamp = state.place, state.stamps, state.text_stamp, state.media_stamp
    for number in range(num_changed):
        _put(state, loads, kept, changed[number], -1.0)
    for number in range(num_changed):
        for column in range(3):
            place[changed[number], column] = after[number, column]
        _put(state, loads, kept, changed[number], 1.0)
    stamps[0] += 1
    for number in range(2 * num_changed):
        places = before if number < num_changed else after
        own = number % num_changed
        rank, microbatch, encoder = places[own, 0], places[own, 1], places[own, 2]
        if text_stamp[rank, microbatch] != stamps[0]:
            text_stamp[rank, microbatch] = stamps[0]
            _price_text(plan, state, rank, microbatch)
        if media_stamp[encoder, microbatch] != stamps[0]:
            media_stamp[encoder, microbatch] = stamps[0]
            _price_media(plan, state, encoder, microbatch)
        _price_message(plan, state, microbatch, encoder, rank)
    _correct(plan.factors, plan, state, before, after, num_changed)


@njit(cache=True)
def _correct(factors, plan, state, before, after, num_changed):
    """Multiply the times of these places' cells, just priced, by their shape bins' factors, once."""
    if factors is None:
        return
    stamps, text_stamp, media_stamp = state.stamps, state.text_stamp, state.media_stamp
    stamps[0] += 1
    for number in range(2 * num_changed):
        places = before if number < num_changed else after
        own = number % num_changed
        rank, microbatch, encoder = places[own, 0], places[own, 1], places[own, 2]
        if text_stamp[rank, microbatch] != stamps[0]:
            text_stamp[rank, microbatch] = stamps[0]
            _correct_cell(factors, plan, state, rank, microbatch, state.text[rank, microbatch], True)
        if media_stamp[encoder, microbatch] != stamps[0]:
            media_stamp[encoder, microbatch] = stamps[0]
            _correct_cell(factors, plan, state, encoder, microbatch, state.media[encoder, microbatch], False)


@njit(cache=True)
def _correct_cell(factors, plan, state, replica, microbatch, loads, is_llm):
    load_bin, segment_bin = bin_of(is_llm, loads)
    forward = factors[int(is_llm), 0, load_bin, segment_bin]
    backward = factors[int(is_llm), 1, load_bin, segment_bin]
    for stage in range(len(plan.stages)):
        if plan.is_llm[stage] == is_llm:
            node = plan.stages[stage, 1] + replica
            state.forward_s[0, node, microbatch] *= forward
            state.backward_s[0, node, microbatch] *= backward
            state.weight_s[0, node, microbatch] *= backward


@njit(cache=True)
def _mark_changed(plan, network, clocks, before, after, num_changed):
    """Mark the columns of these places; where in the order the first of them is computed."""
    first_encoder, first_llm = plan.first_nodes
    first_item = len(network.items)
    for place in range(num_changed):
        for places in (before, after):
            rank, microbatch, encoder = places[place, 0], places[place, 1], places[place, 2]
            for node in (first_llm + rank, first_encoder + encoder):
                if not clocks.is_changed[network.column[node]]:
                    mark(network, clocks, network.column[node])
            first_item = min(first_item, network.first_item[microbatch])
    return first_item


@njit(cache=True, inline="always")
def _put(state, loads, kept, sample, sign):
    """Add a sample's loads to its cells, or (sign -1) take them away."""
    rank, microbatch, encoder = state.place[sample, 0], state.place[sample, 1], state.place[sample, 2]
    for load in range(1, 4):
        state.text[rank, microbatch, load] += sign * loads[sample, load]
    state.media[encoder, microbatch, 0] += sign * loads[sample, 0]
    state.features[microbatch, encoder, rank] += sign * kept[sample]
    state.count[rank, microbatch] += int(sign)


@njit(cache=True, inline="always")
def _price_text(plan, state, replica, microbatch):
    loads = state.text[replica, microbatch]
    for stage in range(len(plan.stages)):
        if plan.is_llm[stage]:
            tokens = loads[1] if plan.sends_text else 0.0
            _price_node(plan, state, stage, replica, microbatch, loads, loads[1] == 0.0, tokens)


@njit(cache=True, inline="always")
def _price_media(plan, state, replica, microbatch):
    loads = state.media[replica, microbatch]
    tokens = state.features[microbatch, replica].sum()
    for stage in range(len(plan.stages)):
        if not plan.is_llm[stage]:
            _price_node(plan, state, stage, replica, microbatch, loads, loads[0] == 0.0, tokens)


@njit(cache=True, inline="always")
def _price_node(plan, state, stage, replica, microbatch, loads, is_empty, tokens):
    node = plan.stages[stage, 1] + replica
    forward_s, backward_s = 0.0, 0.0
    if not is_empty:
        forward_s = form_at(plan.forward, stage, loads)
        backward_s = form_at(plan.backward, stage, loads)
    state.forward_s[0, node, microbatch] = forward_s
    state.backward_s[0, node, microbatch] = backward_s
    state.weight_s[0, node, microbatch] = plan.weight_share[node] * backward_s
    state.chain_s[0, node, microbatch] = plan.chain_latency_s[node] + plan.chain_token_s[node] * tokens


@njit(cache=True, inline="always")
def _price_message(plan, state, microbatch, encoder, replica):
    tokens = state.features[microbatch, encoder, replica]
    state.message_s[microbatch, encoder, replica] = -1.0
    if plan.has_bridges and tokens > 0.0:
        seconds = plan.bridge_latency_s[encoder, replica] + plan.bridge_token_s[encoder, replica] * tokens
        state.message_s[microbatch, encoder, replica] = seconds
