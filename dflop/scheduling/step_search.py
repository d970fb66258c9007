"""Descent on the simulated step time: samples and microbatches change places while the pipeline gets faster by it.

A trial changes a few cells: it swaps two samples, moves one, swaps two buckets of a replica or two microbatches of all,
or gives a sample's media to another encoder replica. Only the changed cells are priced again, and the step is
simulated anew (tens of microseconds). It may be stopped after any number of trials; they are drawn from a seed, so
that equal questions have equal answers.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from dflop.data import SampleShapes
from dflop.pipeline import walk
from dflop.scheduling.policies import NO_CAP
from dflop.scheduling.pricing import WEIGHT_SHARE, Assignment, Pricer

__all__ = ["StepSearch"]

# Beside the step, which the slowest replica sets, the mean of the replicas' ends counts a little: what brings a fast
# one forward makes room for the next change.
_MEAN_SHARE = 0.05
_SWAP, _MOVE, _SWAP_BUCKETS, _SWAP_MICROBATCHES, _MOVE_MEDIA = range(5)
_SHARES = np.cumsum([0.5, 0.2, 0.14, 0.08, 0.08])


class _Plan(NamedTuple):
    """A plan's stages as the kernel wants them; times are linear in loads with hinges (`CostModel.time_forms`)."""

    order: np.ndarray
    stages: np.ndarray
    num_workers: int
    is_llm: np.ndarray  # [num_stages]
    forward: np.ndarray  # [num_stages, 5]
    backward: np.ndarray
    forward_hinges: np.ndarray  # [num_stages, num_hinges, 3]: load, at, slope
    backward_hinges: np.ndarray
    weight_share: np.ndarray  # [num_nodes]
    chain_latency_s: np.ndarray  # [num_nodes]
    chain_token_s: np.ndarray
    bridge_latency_s: np.ndarray  # [num_encoders, num_llm_replicas]
    bridge_token_s: np.ndarray
    sync_s: np.ndarray
    has_bridges: bool
    sends_text: bool
    max_bucket_tokens: int


class _State(NamedTuple):
    """An assignment, and what follows from it."""

    llm_dp_rank: np.ndarray
    microbatch: np.ndarray
    encoder_rank: np.ndarray
    text: np.ndarray  # loads [num_llm_replicas, num_microbatches, 4]
    media: np.ndarray  # loads [num_encoders, num_microbatches, 4]
    features: np.ndarray  # tokens [num_microbatches, num_encoders, num_llm_replicas]
    count: np.ndarray  # samples [num_llm_replicas, num_microbatches]
    forward_s: np.ndarray  # [1, num_nodes, num_microbatches]
    backward_s: np.ndarray
    weight_s: np.ndarray
    chain_s: np.ndarray


class StepSearch:
    """Improves assignments of one batch to one plan."""

    def __init__(self, pricer: Pricer, shapes: SampleShapes, max_bucket_tokens: int | None) -> None:
        """`max_bucket_tokens` is never exceeded by a change; None for no limit."""
        max_bucket_tokens = NO_CAP if max_bucket_tokens is None else max_bucket_tokens
        self._pricer, self._shapes = pricer, shapes
        self._plan = _plan_of(pricer, max_bucket_tokens)
        tokens = shapes.llm_tokens.astype(float)
        self._loads = np.column_stack([shapes.num_items, tokens, tokens**2, shapes.target_tokens]).astype(float)
        self._kept = shapes.kept_vision_tokens.astype(float)

    def improve(self, assignment: Assignment, num_trials: int, seed: int) -> tuple[Assignment, float]:
        """The best assignment met in so many trials, and its step in seconds; no worse than the given one."""
        best, step_s, _ = _descend(
            self._plan, self._state(assignment), self._loads, self._kept, num_trials, seed, _SHARES, _MEAN_SHARE
        )
        return Assignment(llm_dp_rank=best[0], microbatch=best[1], encoder_rank=best[2]), float(step_s)

    def step_s(self, assignment: Assignment) -> float:
        """As `Pricer.step_s` has it."""
        return self.improve(assignment, 0, 0)[1]

    def _state(self, assignment: Assignment) -> _State:
        plan = self._pricer.plan
        encoder, llm = plan.grids
        num_microbatches, num_nodes = plan.num_microbatches, len(self._plan.weight_share)
        state = _State(
            llm_dp_rank=assignment.llm_dp_rank.astype(np.int64),
            microbatch=assignment.microbatch.astype(np.int64),
            encoder_rank=assignment.encoder_rank.astype(np.int64),
            text=np.zeros((llm.dp, num_microbatches, 4)),
            media=np.zeros((encoder.dp, num_microbatches, 4)),
            features=np.zeros((num_microbatches, encoder.dp, llm.dp)),
            count=np.zeros((llm.dp, num_microbatches), dtype=np.int64),
            **{name: np.zeros((1, num_nodes, num_microbatches)) for name in _TIMES},
        )
        return state


_TIMES = ("forward_s", "backward_s", "weight_s", "chain_s")


def _plan_of(pricer: Pricer, max_bucket_tokens: int) -> _Plan:
    plan, costs = pricer.plan, pricer.costs
    forms = [
        form
        for grid in plan.grids
        for form in costs.time_forms(
            grid.module, grid.tp, pricer.stage_costs.layers[grid.module], checkpointing=plan.checkpointing
        )
    ]
    most_hinges = max(len(hinges) for both in forms for _, hinges in both)
    linear = np.array([[form for form, _ in both] for both in forms])
    hinges = np.zeros((len(forms), 2, most_hinges, 3))
    for stage, both in enumerate(forms):
        for way, (_, own) in enumerate(both):
            hinges[stage, way, : len(own)] = own
    has_backward = np.array([pricer.stage_costs.has_backward(stage.module) for stage in pricer.stages])
    linear[~has_backward, 1], hinges[~has_backward, 1] = 0.0, 0.0
    links = pricer.transfers.forms()
    return _Plan(
        order=pricer.compiled.order,
        stages=pricer.compiled.stages,
        num_workers=pricer.compiled.num_workers,
        is_llm=np.array([stage.module == "llm" for stage in pricer.stages]),
        forward=np.ascontiguousarray(linear[:, 0]),
        backward=np.ascontiguousarray(linear[:, 1]),
        forward_hinges=np.ascontiguousarray(hinges[:, 0]),
        backward_hinges=np.ascontiguousarray(hinges[:, 1]),
        weight_share=WEIGHT_SHARE * pricer.trains * (plan.schedule == "zb_h1"),
        sync_s=pricer.sync_s,
        has_bridges=plan.placement != "monolithic",
        sends_text=plan.num_stages("llm") > 1,
        max_bucket_tokens=max_bucket_tokens,
        chain_latency_s=links.chain_latency_s,
        chain_token_s=links.chain_byte_s * pricer.bytes_per_token,
        bridge_latency_s=links.bridge_latency_s,
        bridge_token_s=links.bridge_byte_s * pricer.bytes_per_token,
    )


@njit(cache=True)
def _descend(plan, state, loads, kept, num_trials, seed, shares, mean_share):
    """The best of the assignments met [3, num_samples], its step, and how many trials were taken."""
    np.random.seed(seed)
    num_samples = len(kept)
    num_replicas, num_microbatches = state.count.shape
    num_encoders = len(state.media)
    for sample in range(num_samples):
        _put(state, loads, kept, sample, 1.0)
    for microbatch in range(num_microbatches):
        for replica in range(num_replicas):
            _price_text(plan, state, replica, microbatch)
        for replica in range(num_encoders):
            _price_media(plan, state, replica, microbatch)
    end_s = np.empty((1, 3, state.forward_s.shape[1], num_microbatches))
    best = np.stack((state.llm_dp_rank, state.microbatch, state.encoder_rank))
    best_s, goal_s = _simulate(plan, state, end_s, mean_share)
    now_s, num_taken = goal_s, 0
    changed = np.empty(num_samples, dtype=np.int64)
    before = np.empty((num_samples, 3), dtype=np.int64)
    for _ in range(num_trials):
        kind = np.searchsorted(shares, np.random.random())
        sample = np.random.randint(num_samples)
        rank, microbatch = state.llm_dp_rank[sample], state.microbatch[sample]
        num_changed = 0
        if kind == _SWAP:
            other = np.random.randint(num_samples)
            if state.llm_dp_rank[other] == rank and state.microbatch[other] == microbatch:
                continue
            shift = loads[other, 1] - loads[sample, 1]
            if (
                state.text[rank, microbatch, 1] + shift > plan.max_bucket_tokens
                or state.text[state.llm_dp_rank[other], state.microbatch[other], 1] - shift > plan.max_bucket_tokens
            ):
                continue
            changed[0], changed[1] = sample, other
            num_changed = 2
        elif kind == _MOVE:
            to_rank, to_microbatch = np.random.randint(num_replicas), np.random.randint(num_microbatches)
            if (to_rank == rank and to_microbatch == microbatch) or state.count[rank, microbatch] == 1:
                continue
            if state.text[to_rank, to_microbatch, 1] + loads[sample, 1] > plan.max_bucket_tokens:
                continue
            changed[0] = sample
            num_changed = 1
        elif kind != _MOVE_MEDIA:
            to_microbatch = np.random.randint(num_microbatches)
            if to_microbatch == microbatch:
                continue
            for own in range(num_samples):
                if kind == _SWAP_BUCKETS and state.llm_dp_rank[own] != rank:
                    continue
                if state.microbatch[own] == microbatch or state.microbatch[own] == to_microbatch:
                    changed[num_changed] = own
                    num_changed += 1
        else:
            if num_encoders == 1 or kept[sample] == 0.0 or not plan.has_bridges:
                continue
            changed[0] = sample
            num_changed = 1
        for place in range(num_changed):
            own = changed[place]
            before[place, 0], before[place, 1] = state.llm_dp_rank[own], state.microbatch[own]
            before[place, 2] = state.encoder_rank[own]
            _put(state, loads, kept, own, -1.0)
        for place in range(num_changed):
            own = changed[place]
            if kind == _SWAP:
                state.llm_dp_rank[own], state.microbatch[own] = before[1 - place, 0], before[1 - place, 1]
            elif kind == _MOVE:
                state.llm_dp_rank[own], state.microbatch[own] = to_rank, to_microbatch
            elif kind == _MOVE_MEDIA:
                state.encoder_rank[own] = np.random.randint(num_encoders)
            else:
                state.microbatch[own] = to_microbatch if before[place, 1] == microbatch else microbatch
            if not plan.has_bridges:
                state.encoder_rank[own] = state.llm_dp_rank[own]
            _put(state, loads, kept, own, 1.0)
        _price_changed(plan, state, changed, before, num_changed)
        step_s, goal_s = _simulate(plan, state, end_s, mean_share)
        if goal_s <= now_s:
            now_s = goal_s
            num_taken += 1
            if step_s < best_s:
                best_s = step_s
                best[0], best[1], best[2] = state.llm_dp_rank, state.microbatch, state.encoder_rank
            continue
        for place in range(num_changed):
            _put(state, loads, kept, changed[place], -1.0)
        for place in range(num_changed):
            own = changed[place]
            now = (state.llm_dp_rank[own], state.microbatch[own], state.encoder_rank[own])
            state.llm_dp_rank[own], state.microbatch[own] = before[place, 0], before[place, 1]
            state.encoder_rank[own] = before[place, 2]
            before[place, 0], before[place, 1], before[place, 2] = now
            _put(state, loads, kept, own, 1.0)
        _price_changed(plan, state, changed, before, num_changed)
    return best, best_s, num_taken


@njit(cache=True)
def _put(state, loads, kept, sample, sign):
    """Add a sample's loads to its cells, or (sign -1) take them away."""
    rank, microbatch, encoder = state.llm_dp_rank[sample], state.microbatch[sample], state.encoder_rank[sample]
    for load in range(1, 4):
        state.text[rank, microbatch, load] += sign * loads[sample, load]
    state.media[encoder, microbatch, 0] += sign * loads[sample, 0]
    state.features[microbatch, encoder, rank] += sign * kept[sample]
    state.count[rank, microbatch] += int(sign)


@njit(cache=True)
def _price_changed(plan, state, changed, before, num_changed):
    """Price the cells that samples left and came to; a whole microbatch once where many changed."""
    for place in range(num_changed):
        own = changed[place]
        is_new = place == 0 or num_changed == 2
        for past in (True, False):
            rank = before[place, 0] if past else state.llm_dp_rank[own]
            microbatch = before[place, 1] if past else state.microbatch[own]
            encoder = before[place, 2] if past else state.encoder_rank[own]
            if is_new or num_changed > 2:
                _price_text(plan, state, rank, microbatch)
                _price_media(plan, state, encoder, microbatch)


@njit(cache=True)
def _price_text(plan, state, replica, microbatch):
    loads = state.text[replica, microbatch]
    for stage in range(len(plan.stages)):
        if plan.is_llm[stage]:
            tokens = loads[1] if plan.sends_text else 0.0
            _price_node(plan, state, stage, replica, microbatch, loads, loads[1] == 0.0, tokens)


@njit(cache=True)
def _price_media(plan, state, replica, microbatch):
    loads = state.media[replica, microbatch]
    tokens = state.features[microbatch, replica].sum()
    for stage in range(len(plan.stages)):
        if not plan.is_llm[stage]:
            _price_node(plan, state, stage, replica, microbatch, loads, loads[0] == 0.0, tokens)


@njit(cache=True)
def _price_node(plan, state, stage, replica, microbatch, loads, is_empty, tokens):
    node = plan.stages[stage, 1] + replica
    forward_s, backward_s = 0.0, 0.0
    if not is_empty:
        forward_s = _form_at(plan.forward[stage], plan.forward_hinges[stage], loads)
        backward_s = _form_at(plan.backward[stage], plan.backward_hinges[stage], loads)
    state.forward_s[0, node, microbatch] = forward_s
    state.backward_s[0, node, microbatch] = backward_s
    state.weight_s[0, node, microbatch] = plan.weight_share[node] * backward_s
    state.chain_s[0, node, microbatch] = plan.chain_latency_s[node] + plan.chain_token_s[node] * tokens


@njit(cache=True)
def _form_at(form, hinges, loads):
    total = form[0]
    for load in range(4):
        total += form[1 + load] * loads[load]
    for hinge in range(len(hinges)):
        total += hinges[hinge, 2] * max(0.0, loads[int(hinges[hinge, 0])] - hinges[hinge, 1])
    return total


@njit(cache=True)
def _simulate(plan, state, end_s, mean_share):
    """The step, and the step with a share of the LLM replicas' mean end."""
    num_microbatches, num_encoders, num_replicas = state.features.shape
    most = 0
    if plan.has_bridges:
        most = np.count_nonzero(state.features)
    source, target = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    seconds = np.empty(most)
    starts = np.zeros(num_microbatches + 1, dtype=np.int64)
    first_encoder, first_llm = 0, 0
    for stage in range(len(plan.stages)):
        if plan.is_llm[stage]:
            first_llm = plan.stages[stage, 1]
            break
        first_encoder = plan.stages[stage, 1]
    message = 0
    if plan.has_bridges:
        for microbatch in range(num_microbatches):
            for encoder in range(num_encoders):
                for replica in range(num_replicas):
                    tokens = state.features[microbatch, encoder, replica]
                    if tokens > 0.0:
                        source[message], target[message] = first_encoder + encoder, first_llm + replica
                        seconds[message] = (
                            plan.bridge_latency_s[encoder, replica] + plan.bridge_token_s[encoder, replica] * tokens
                        )
                        message += 1
            starts[microbatch + 1] = message
    nothing = np.empty((0, 0, 0, 0))
    step_s = walk(
        plan.order,
        plan.stages,
        plan.num_workers,
        state.forward_s,
        state.backward_s,
        state.weight_s,
        state.chain_s,
        starts,
        source,
        target,
        seconds,
        plan.sync_s,
        nothing,
        end_s,
    )[0]
    total = 0.0
    for replica in range(num_replicas):
        latest = 0.0
        for microbatch in range(num_microbatches):
            latest = max(latest, end_s[0, 1, first_llm + replica, microbatch])
        total += latest
    return step_s, step_s + mean_share * total / num_replicas
