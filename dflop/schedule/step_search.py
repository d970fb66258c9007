"""Descent on the simulated step time: samples and microbatches change places while this does not make the step longer.

A trial changes a few cells: it swaps two samples, moves one, swaps two buckets of a replica or two microbatches of all
replicas, gives a sample's media to another encoder replica, or swaps the media of two samples. Only the changed cells
are priced again, and the step is simulated again (microseconds). Trials are drawn from a seed, so that equal problems
have equal answers.

In plans with stages, from a start that is packed by ideal shares, descent does as well as annealing. With 2 to 8
samples a bucket and 64 buckets, steps after 8,000 trials were 0 to 1.1 % longer than after 160,000 (mean over ten
batches; single ones up to 2.7 %).
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import BACKWARD
from dflop.schedule.assignment import Assignment
from dflop.schedule.pricer import Pricer
from dflop.schedule.stage_costs import loads_of
from dflop.schedule.stage_forms import stage_forms
from dflop.schedule.step_memory import excess_bytes, step_memory
from dflop.schedule.step_state import change_places, new_state, price_all
from dflop.shapes import SampleShapes
from dflop.step import columns_of
from dflop.step.simulation_kernel import DP, FIRST_NODE, PARTS, SHARED, walk
from dflop.step.syncs import SyncParts, add_syncs, sync_parts

__all__ = ["StepSearch"]

# The step ends with its slowest column. The mean of all columns' ends counts a little, too: a change that only shortens
# a faster column makes room for the next change.
MEAN_SHARE = 0.05
# A schedule that needs more memory than a device has counts as longer, by this weight times the excess as a share of
# the device's memory. The weight doubles every `MORE_WEIGHT_EVERY` trials as long as the schedule exceeds the limit.
EXCESS_WEIGHT = 2.0
MORE_WEIGHT_EVERY = 250
# The share of trials with a sample of the column that ends last, and the most draws to find such a sample.
FOCUS = 0.5
MOST_DRAWS = 200
# How often the encoders' slots are computed anew in one search.
NUM_ROUNDS = 6
# The share of swaps between samples of about the same size: of all samples sorted by size, at most `NEAR_SHARE` lie
# between the two. With 2 or 3 samples a bucket, other swaps change far too much once buckets are nearly right.
NEAR = 0.8
NEAR_SHARE = 0.1
# Seconds of a trial, and of each replica's pass that it simulates.
_TRIAL_S, _VISIT_S = 4e-6, 1.2e-8
_SWAP, _MOVE, _SWAP_BUCKETS, _SWAP_MICROBATCHES, _MOVE_MEDIA, _SWAP_MEDIA = range(6)
# The shares of the six kinds of change, cumulated. Changes of media alone made colocated steps 0.4 % shorter at the
# same number of trials.
_SHARES = np.cumsum([0.4, 0.18, 0.07, 0.03, 0.16, 0.16])


class _Change(NamedTuple):
    """Buffers for the samples that a trial moves, and for their places before and after it."""

    samples: np.ndarray  # [num_samples]
    before: np.ndarray  # [num_samples, 2 + num_encoders]
    after: np.ndarray


class _Clocks(NamedTuple):
    """The plan's order for `walk`, the arrays that it writes, and the columns (`step.columns`) with their ends."""

    items: np.ndarray
    last_backwards: np.ndarray
    stages: np.ndarray
    worker_s: np.ndarray  # [num_workers]
    end_s: np.ndarray  # [2, num_cells]
    start_s: np.ndarray  # empty: starts are not needed
    syncs: SyncParts
    synced_s: np.ndarray  # [num_workers]
    worker_column: np.ndarray  # [num_workers]
    column_end_s: np.ndarray  # [num_columns]
    llm_column: np.ndarray  # [num_llm_replicas]
    media_column: np.ndarray  # [num_encoder_replicas]


class StepSearch:
    """Improves assignments of one batch to one plan."""

    def __init__(self, pricer: Pricer, shapes: SampleShapes) -> None:
        self._pricer, self._shapes = pricer, shapes
        self._forms, self._memory = stage_forms(pricer), step_memory(pricer)
        self._clocks = _clocks_of(pricer)
        text = np.column_stack(loads_of("llm", shapes))
        media = np.zeros((len(shapes), len(shapes.encoders), 4))
        for number, encoder in enumerate(shapes.encoders):
            media[:, number] = np.column_stack(loads_of(encoder, shapes))
        by_size = np.argsort(shapes.llm_tokens, kind="stable")
        size_rank = np.argsort(by_size)  # each sample's place in `by_size`
        # The shares of a sample stay on their replicas, in one microbatch.
        is_share = np.zeros(len(shapes), dtype=bool) if shapes.degree is None else shapes.degree > 1
        self._samples = text, media, shapes.kept_tokens.astype(float), by_size, size_rank, is_share

    @property
    def trial_s(self) -> float:
        """About how many seconds a trial takes: on a core of 2023, with nothing beside it."""
        compiled = self._pricer.compiled
        num_replicas = compiled.stages[:, DP] // compiled.stages[:, PARTS]
        num_visits = int(num_replicas[compiled.order[:, 1]].sum())
        return _TRIAL_S + _VISIT_S * num_visits

    def improve(self, assignment: Assignment, num_trials: int, seed: int) -> tuple[Assignment, float]:
        """The best assignment found in `num_trials` trials that fits into memory, and its step time in seconds.

        It is no worse than the given one, if that fits. Where none that fits is found, the step time is infinite. Where
        encoders fill bubbles, their slots are found again between rounds of trials.
        """
        if self._pricer.filler is None or num_trials == 0:
            return self._descend(assignment, num_trials, seed)
        best, best_s = assignment, np.inf
        for number in range(NUM_ROUNDS):
            start = min((best, self._pricer.filled(self._shapes, best)), key=self._excess_and_step)
            found, found_s = self._descend(start, num_trials // NUM_ROUNDS, seed + number)
            if found_s < best_s:
                best, best_s = found, found_s
        if best_s == np.inf:  # Each round started over from the same assignment: use all trials in one descent.
            return self._descend(start, num_trials, seed)
        return best, best_s

    def _excess_and_step(self, assignment: Assignment) -> tuple[float, float]:
        """Bytes beyond the memory of a device, and the step time in seconds."""
        needed_bytes = max(self._pricer.memory_bytes(self._shapes, assignment).values())
        excess_bytes = max(0.0, needed_bytes - self._pricer.memory.limit_bytes)
        return excess_bytes, self._pricer.step_s(self._shapes, assignment)

    def _descend(self, assignment: Assignment, num_trials: int, seed: int) -> tuple[Assignment, float]:
        """As `improve`, but with the slots of the given assignment."""
        order = self._pricer.order(assignment.slots)
        first_replica = self._forms.first_replica[:-1]
        place = np.column_stack(
            [assignment.llm_dp_rank, assignment.microbatch, assignment.encoder_rank + first_replica]
        ).astype(np.int64)
        best, step_s = _descend_on_step(
            self._forms,
            self._clocks._replace(
                items=order.items,
                last_backwards=order.last_backwards,
                syncs=sync_parts(order, self._pricer.sync_s, self._pricer.early_sync_s, self._pricer.late_sync_s),
            ),
            self._memory._replace(order=order.order, slot_bytes=self._pricer.memory.slot_bytes(order)),
            new_state(self._forms, place, self._pricer.compiled.num_microbatches),
            self._samples,
            num_trials,
            seed,
        )
        replica, microbatch, *_ = np.ascontiguousarray(best.T)
        encoder_rank = best[:, 2:] - first_replica
        found = replace(assignment, llm_dp_rank=replica, microbatch=microbatch, encoder_rank=encoder_rank)
        return found, float(step_s)

    def step_s(self, assignment: Assignment) -> float:
        """The step time in seconds, as `Pricer.step_s`; infinite where the assignment does not fit into memory."""
        return self.improve(assignment, 0, 0)[1]


def _clocks_of(pricer: Pricer) -> _Clocks:
    compiled = pricer.compiled
    node_column, worker_column = columns_of(compiled)
    first, last = ({stage.module: stage for stage in stages} for stages in (reversed(pricer.stages), pricer.stages))
    of_encoders = [node_column[last[grid.module].first_node :][: grid.dp] for grid in pricer.plan.grids[:-1]]
    llm = first["llm"]
    return _Clocks(
        items=compiled.items,
        last_backwards=compiled.last_backwards,
        stages=compiled.stages,
        worker_s=np.zeros(compiled.num_workers),
        end_s=np.zeros((2, compiled.num_nodes * compiled.num_microbatches)),
        start_s=np.zeros((0, 0)),
        syncs=sync_parts(compiled, pricer.sync_s, pricer.early_sync_s, pricer.late_sync_s),
        synced_s=np.zeros(compiled.num_workers),
        worker_column=worker_column,
        column_end_s=np.zeros(int(worker_column.max()) + 1),
        llm_column=node_column[llm.first_node : llm.first_node + llm.dp],
        media_column=np.concatenate([np.zeros(0, dtype=np.int64), *of_encoders]),
    )


@kernel
def _descend_on_step(forms, clocks, memory, state, samples, num_trials, seed):
    """The best places found that fit into memory [num_samples, 2 + num_encoders], and their step time."""
    np.random.seed(seed)
    num_samples, num_columns = state.place.shape
    price_all(forms, state, samples)
    best_s, goal_s, latest = _simulated(state, clocks)
    excess, fullest = excess_bytes(memory, forms, state)
    best, now_s, weight = state.place.copy(), goal_s, EXCESS_WEIGHT / memory.room_bytes.max()
    if excess > 0.0:
        best_s, now_s = np.inf, goal_s * (1.0 + weight * excess)
    places = (num_samples, num_columns)
    change = _Change(np.empty(num_samples, np.int64), np.empty(places, np.int64), np.empty(places, np.int64))
    for trial in range(num_trials):
        if excess > 0.0 and trial % MORE_WEIGHT_EVERY == MORE_WEIGHT_EVERY - 1:
            now_s, weight = goal_s * (1.0 + 2.0 * weight * excess), 2.0 * weight
        kind = np.searchsorted(_SHARES, np.random.random())
        # The column that ends last, or the one whose worker needs too much memory.
        column = clocks.worker_column[fullest] if excess > 0.0 and np.random.random() < FOCUS else latest
        num_changed = _propose(forms, clocks, state, samples, kind, column, change)
        if num_changed == 0:
            continue
        change_places(forms, state, samples, change.samples, change.before, change.after, num_changed)
        step_s, its_goal_s, its_latest = _simulated(state, clocks)
        is_taken = its_goal_s <= now_s
        if is_taken:
            its_excess, its_fullest = excess_bytes(memory, forms, state)
            if excess > 0.0:
                is_taken = its_excess <= 0.0 or its_goal_s * (1.0 + weight * its_excess) <= now_s
            else:
                is_taken = its_excess <= 0.0
        if is_taken:
            goal_s, latest, excess, fullest = its_goal_s, its_latest, its_excess, its_fullest
            now_s = goal_s * (1.0 + weight * max(0.0, excess))
            if excess <= 0.0 and step_s < best_s:
                best_s = step_s
                best[:] = state.place
            continue
        change_places(forms, state, samples, change.samples, change.after, change.before, num_changed)
    return best, best_s


@kernel
def _simulated(state, clocks):
    """The step time; the goal, which adds `MEAN_SHARE` of the columns' mean end; and the column that ends last."""
    syncs, end_s = clocks.syncs, clocks.end_s
    walk(clocks.items, state.seconds, state.chain_s, state.messages, syncs, clocks.worker_s, end_s, clocks.start_s)
    order = clocks.last_backwards, clocks.stages, state.count.shape[1]
    add_syncs(order, state.seconds, end_s, clocks.worker_s, syncs, clocks.synced_s)
    column_s = clocks.column_end_s
    column_s[:] = 0.0
    for worker in range(len(clocks.worker_s)):
        column = clocks.worker_column[worker]
        column_s[column] = max(column_s[column], clocks.synced_s[worker])
    latest = column_s.argmax()
    return column_s[latest], column_s[latest] + MEAN_SHARE * column_s.mean(), latest


@kernel
def _propose(forms, clocks, state, samples, kind, latest, change):
    """Write a random change of this kind to `change`; return how many samples it moves, 0 where it is not possible."""
    _, _, kept_tokens, by_size, size_rank, is_share = samples
    place, count = state.place, state.count
    sample = _draw_sample(forms, clocks, state, kind, latest)
    _note(place, change, 0, sample)
    num_changed = 0
    if kind == _SWAP:
        num_changed = _swap(place, by_size, size_rank, change)
    elif kind == _MOVE:
        num_changed = _move(place, count, change)
    elif kind not in (_MOVE_MEDIA, _SWAP_MEDIA):
        num_changed = _swap_microbatches(place, count.shape[1], kind == _SWAP_BUCKETS, change)
    elif forms.has_bridges:
        num_changed = _change_media(place, forms.first_replica, kept_tokens, kind == _SWAP_MEDIA, change)
    if kind in (_SWAP, _MOVE, _SWAP_BUCKETS):
        for number in range(num_changed):
            if is_share[change.samples[number]]:
                return 0
    if not forms.has_bridges:
        for encoder in range(kept_tokens.shape[1]):
            change.after[:num_changed, 2 + encoder] = forms.first_replica[encoder] + change.after[:num_changed, 0]
    return num_changed


@kernel
def _note(place, change, number, sample):
    """Enter a sample as the change's `number`th, with its present place before and after."""
    change.samples[number] = sample
    change.before[number], change.after[number] = place[sample], place[sample]


@kernel
def _swap(place, by_size, size_rank, change):
    """Swap the sample with one of another bucket, mostly of about its size; media stay on their encoder replicas."""
    sample, other = change.samples[0], np.random.randint(len(by_size))
    if np.random.random() < NEAR:
        most_between = max(1, int(len(by_size) * NEAR_SHARE))
        near = size_rank[sample] + np.random.randint(-most_between, most_between + 1)
        other = by_size[min(max(near, 0), len(by_size) - 1)]
    replica, microbatch = place[sample, 0], place[sample, 1]
    its_replica, its_microbatch = place[other, 0], place[other, 1]
    if its_replica == replica and its_microbatch == microbatch:
        return 0
    _note(place, change, 1, other)
    change.after[0, :2], change.after[1, :2] = place[other, :2], place[sample, :2]
    return 2


@kernel
def _move(place, count, change):
    """Move the sample to another bucket; no bucket is left empty."""
    sample, (num_replicas, num_microbatches) = change.samples[0], count.shape
    replica, microbatch = place[sample, 0], place[sample, 1]
    to_replica, to_microbatch = np.random.randint(num_replicas), np.random.randint(num_microbatches)
    if (to_replica == replica and to_microbatch == microbatch) or count[replica, microbatch] == 1:
        return 0
    change.after[0, 0], change.after[0, 1] = to_replica, to_microbatch
    return 1


@kernel
def _change_media(place, first_replica, kept_tokens, swaps, change):
    """Move the sample's media to another replica of an encoder; if `swaps`, in exchange for media of another sample of
    the microbatch."""
    sample, (num_samples, num_encoders) = change.samples[0], kept_tokens.shape
    if num_encoders == 0:
        return 0
    encoder = np.random.randint(num_encoders)
    first, behind = first_replica[encoder], first_replica[encoder + 1]
    if behind - first == 1 or kept_tokens[sample, encoder] == 0.0:
        return 0
    replica = place[sample, 2 + encoder]
    if not swaps:
        change.after[0, 2 + encoder] = np.random.randint(first, behind)
        return 1
    for _ in range(MOST_DRAWS):
        other = np.random.randint(num_samples)
        its_replica = place[other, 2 + encoder]
        if place[other, 1] == place[sample, 1] and its_replica != replica:
            _note(place, change, 1, other)
            change.after[0, 2 + encoder], change.after[1, 2 + encoder] = its_replica, replica
            return 2
    return 0


@kernel
def _swap_microbatches(place, num_microbatches, of_one_replica, change):
    """Swap the sample's microbatch with another: on the sample's LLM replica only (`of_one_replica`), or on all."""
    sample = change.samples[0]
    replica, microbatch = place[sample, 0], place[sample, 1]
    to_microbatch = np.random.randint(num_microbatches)
    if to_microbatch == microbatch:
        return 0
    num_changed = 0
    for moved in range(len(place)):
        its_microbatch = place[moved, 1]
        if of_one_replica and place[moved, 0] != replica:
            continue
        if its_microbatch in (microbatch, to_microbatch):
            _note(place, change, num_changed, moved)
            change.after[num_changed, 1] = to_microbatch if its_microbatch == microbatch else microbatch
            num_changed += 1
    return num_changed


@kernel
def _draw_sample(forms, clocks, state, kind, latest):
    """Draw any sample, or one of the column that ends last: a change elsewhere does not shorten the step."""
    num_samples, num_columns = state.place.shape
    sample = np.random.randint(num_samples)
    if np.random.random() >= FOCUS:
        return sample
    module = _draw_module(forms, kind)
    if forms.stages[forms.first_stage[module], SHARED] > 1:
        return _draw_of_slowest(forms, clocks, state, module, latest, sample)
    for _ in range(MOST_DRAWS):
        is_there = clocks.llm_column[state.place[sample, 0]] == latest
        for column in range(2, num_columns):
            is_there = is_there or clocks.media_column[state.place[sample, column]] == latest
        if is_there:
            break
        sample = np.random.randint(num_samples)
    return sample


@kernel
def _draw_module(forms, kind):
    """The number of the module whose load a change of this kind changes: an encoder's for media alone, else the LLM's;
    without bridges any module's."""
    num_encoders = len(forms.first_replica) - 1
    if not forms.has_bridges:
        return np.random.randint(num_encoders + 1)
    if kind in (_MOVE_MEDIA, _SWAP_MEDIA):
        return np.random.randint(num_encoders)
    return num_encoders


@kernel
def _draw_of_slowest(forms, clocks, state, module, latest, drawn):
    """The next sample after `drawn` in the cell that others of its microbatch wait for, in a random microbatch.

    The replicas of the module share parameters, so each waits for the slowest of them in every microbatch. Those in the
    column that ends last count, or all where none is in it.
    """
    stage, num_encoders, num_samples = forms.first_stage[module], len(forms.first_replica) - 1, len(state.place)
    microbatch, num_microbatches = np.random.randint(state.count.shape[1]), state.count.shape[1]
    dp, column = forms.stages[stage, DP], 0 if module == num_encoders else 2 + module
    first_replica = 0 if module == num_encoders else forms.first_replica[module]
    first_cell = forms.stages[stage, FIRST_NODE] * num_microbatches + microbatch * dp
    slowest, longest_s = first_replica, -1.0
    for replica in range(dp):
        own_column = (
            clocks.llm_column[replica] if module == num_encoders else clocks.media_column[first_replica + replica]
        )
        seconds = state.seconds[BACKWARD, first_cell + replica]
        if own_column == latest and seconds > longest_s:
            slowest, longest_s = first_replica + replica, seconds
    for number in range(num_samples):
        sample = (drawn + number) % num_samples
        if state.place[sample, column] == slowest and state.place[sample, 1] == microbatch:
            return sample
    return drawn
