"""The state of the step search: an assignment, and the loads, times and messages that follow from it.

A change moves a few samples between cells; only these cells are priced again.
"""

from typing import NamedTuple

import numpy as np

from dflop.base.kernels import kernel
from dflop.costs.forms import terms_at
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.schedule.correction import bin_of
from dflop.schedule.stage_forms import StageForms
from dflop.step.simulation_kernel import DP, FIRST_NODE, Messages

__all__ = ["StepState", "change_places", "new_state", "price_all"]


class StepState(NamedTuple):
    """An assignment, and what follows from it. The replicas of all encoders are numbered consecutively, as in
    `StageForms`."""

    place: np.ndarray  # [num_samples, 2 + num_encoders]: LLM replica, microbatch, replica of each encoder
    text: np.ndarray  # loads [num_llm_replicas, num_microbatches, 4]
    media: np.ndarray  # loads [num_encoder_replicas, num_microbatches, 4]
    features: np.ndarray  # tokens [num_microbatches, num_encoder_replicas, num_llm_replicas]
    sent: np.ndarray  # sums of `features` over the LLM's replicas, [num_microbatches, num_encoder_replicas]
    received: np.ndarray  # sums of `features` over the encoders' replicas, [num_microbatches, num_llm_replicas]
    entry: np.ndarray  # of the same shape: the message's index in `messages`, -1 where there is none
    messages: Messages
    count: np.ndarray  # samples [num_llm_replicas, num_microbatches]
    seconds: np.ndarray  # [2, num_cells], as `walk` takes it
    chain_s: np.ndarray  # [num_cells]
    stamps: np.ndarray  # [1]: the number of the last change; the next two: that of each cell's last pricing
    text_stamp: np.ndarray  # [num_llm_replicas, num_microbatches]
    media_stamp: np.ndarray  # [num_encoder_replicas, num_microbatches]


def new_state(forms: StageForms, place: np.ndarray, num_microbatches: int) -> StepState:
    """The state of samples at these places, without loads and times: `price_all` computes them.

    `place` is [num_samples, 2 + num_encoders], as in `StepState`.
    """
    last = forms.stages[-1]
    num_replicas, num_cells = int(last[DP]), int(last[FIRST_NODE] + last[DP]) * num_microbatches
    of_encoders = np.diff(forms.first_replica)
    num_encoder_replicas = int(of_encoders.sum())
    # A list has at most one message for each pair of replicas, and at most one for each sample.
    of_parts = np.repeat(of_encoders // forms.num_parts, forms.num_parts)
    room = np.tile(np.minimum(of_parts * num_replicas, len(place)), num_microbatches)
    pairs = (num_microbatches, num_encoder_replicas, num_replicas)
    return StepState(
        place=place,
        text=np.zeros((num_replicas, num_microbatches, 4)),
        media=np.zeros((num_encoder_replicas, num_microbatches, 4)),
        features=np.zeros(pairs),
        sent=np.zeros(pairs[:2]),
        received=np.zeros((num_microbatches, num_replicas)),
        entry=np.full(pairs, -1),
        messages=Messages(
            first=(np.cumsum(room) - room).astype(np.uint64),
            count=np.zeros(len(room), dtype=np.uint64),
            source=np.zeros(room.sum(), dtype=np.uint64),
            target=np.zeros(room.sum(), dtype=np.uint64),
            seconds=np.zeros(room.sum()),
        ),
        count=np.zeros((num_replicas, num_microbatches), dtype=np.int64),
        seconds=np.zeros((2, num_cells)),
        chain_s=np.zeros(num_cells),
        stamps=np.zeros(1, dtype=np.int64),
        text_stamp=np.zeros((num_replicas, num_microbatches), dtype=np.int64),
        media_stamp=np.zeros((num_encoder_replicas, num_microbatches), dtype=np.int64),
    )


@kernel
def price_all(forms, state, samples):
    """Add the loads of all samples to a new state, and price all cells."""
    for sample in range(len(state.place)):
        _put(forms, state, samples, sample, 1.0)
    for microbatch in range(state.count.shape[1]):
        for replica in range(len(state.text)):
            _price_text(forms, state, replica, microbatch)
        for replica in range(len(state.media)):
            _price_media(forms, state, replica, microbatch)
            for other in range(len(state.text)):
                _price_message(forms, state, microbatch, replica, other)


@kernel
def change_places(forms, state, samples, changed, before, after, num_changed):
    """Move samples from their places `before` to those `after`, and price each cell that changed once.

    `changed` are the indices of the `num_changed` samples; `before` and `after` are [num_samples, 2 + num_encoders].
    """
    place, stamps, text_stamp, media_stamp = state.place, state.stamps, state.text_stamp, state.media_stamp
    for number in range(num_changed):
        _put(forms, state, samples, changed[number], -1.0)
    for number in range(num_changed):
        for column in range(place.shape[1]):
            place[changed[number], column] = after[number, column]
        _put(forms, state, samples, changed[number], 1.0)
    stamps[0] += 1
    for number in range(2 * num_changed):
        places = before if number < num_changed else after
        index = number % num_changed
        replica, microbatch = places[index, 0], places[index, 1]
        if text_stamp[replica, microbatch] != stamps[0]:
            text_stamp[replica, microbatch] = stamps[0]
            _price_text(forms, state, replica, microbatch)
        for column in range(2, place.shape[1]):
            encoder_replica = places[index, column]
            if media_stamp[encoder_replica, microbatch] != stamps[0]:
                media_stamp[encoder_replica, microbatch] = stamps[0]
                _price_media(forms, state, encoder_replica, microbatch)
            _price_message(forms, state, microbatch, encoder_replica, replica)


@kernel(inline="always")
def _put(forms, state, samples, sample, sign):
    """Add a sample's loads to its cells, or subtract them (`sign` is 1 or -1)."""
    text, media, kept_tokens, _, _, _ = samples
    replica, microbatch = state.place[sample, 0], state.place[sample, 1]
    for load in range(4):
        state.text[replica, microbatch, load] += sign * text[sample, load]
    state.count[replica, microbatch] += int(sign)
    for encoder in range(len(forms.first_replica) - 1):
        encoder_replica = state.place[sample, 2 + encoder]
        for load in (0, 2):  # items, and squares of their runs
            state.media[encoder_replica, microbatch, load] += sign * media[sample, encoder, load]
        tokens = sign * kept_tokens[sample, encoder]
        state.features[microbatch, encoder_replica, replica] += tokens
        state.sent[microbatch, encoder_replica] += tokens
        state.received[microbatch, replica] += tokens


@kernel(inline="always")
def _price_text(forms, state, replica, microbatch):
    loads = state.text[replica, microbatch]
    tokens = loads[1] if forms.sends_text else 0.0
    module = len(forms.first_stage) - 2
    _price_stages(forms, state, module, replica, microbatch, loads, loads[1] == 0.0, tokens)


@kernel(inline="always")
def _price_media(forms, state, encoder_replica, microbatch):
    loads = state.media[encoder_replica, microbatch]
    tokens = state.sent[microbatch, encoder_replica]
    encoder = np.searchsorted(forms.first_replica, encoder_replica, side="right") - 1
    replica = encoder_replica - forms.first_replica[encoder]
    _price_stages(forms, state, encoder, replica, microbatch, loads, loads[0] == 0.0, tokens)


@kernel
def _price_stages(forms, state, module, replica, microbatch, loads, is_empty, tokens):
    """Compute the times of all stages of a module's replica for one microbatch."""
    num_microbatches = state.count.shape[1]
    forward_factor, backward_factor = _factors_of(forms.factors, module, loads)
    for stage in range(forms.first_stage[module], forms.first_stage[module + 1]):
        dp, first_node = forms.stages[stage, DP], forms.stages[stage, FIRST_NODE]
        node, cell = first_node + replica, first_node * num_microbatches + microbatch * dp + replica
        forward_s, backward_s = 0.0, 0.0
        if not is_empty:
            forward_s = terms_at(forms.forward, stage, loads)
            backward_s = terms_at(forms.backward, stage, loads)
            forward_s, backward_s = forward_s * forward_factor, backward_s * backward_factor
        state.seconds[FORWARD, cell] = forward_s
        state.seconds[BACKWARD, cell] = backward_s
        state.chain_s[cell] = forms.chain_latency_s[node] + forms.chain_token_s[node] * tokens


@kernel
def _factors_of(factors, module, loads):
    """The corrections of a microbatch's forward and backward times."""
    load_bin, segment_bin = bin_of(loads)
    return factors[module, 0, load_bin, segment_bin], factors[module, 1, load_bin, segment_bin]


@kernel
def _price_message(forms, state, microbatch, encoder_replica, replica):
    """Price the features that go from an encoder's replica to one of the LLM's; add or remove the message."""
    messages, tokens = state.messages, state.features[microbatch, encoder_replica, replica]
    entry = state.entry[microbatch, encoder_replica, replica]
    has_message = forms.has_bridges and tokens > 0.0
    if not has_message and entry < 0:
        return
    encoder = np.searchsorted(forms.first_replica, encoder_replica, side="right") - 1
    first_replica, behind = forms.first_replica[encoder], forms.first_replica[encoder + 1]
    part = (encoder_replica - first_replica) * forms.num_parts // (behind - first_replica)
    own_list = (microbatch * (len(forms.first_replica) - 1) + encoder) * forms.num_parts + part
    if entry < 0:
        entry = np.int64(messages.first[own_list] + messages.count[own_list])
        messages.count[own_list] += np.uint64(1)
        messages.source[entry] = _first_source(forms, state, encoder, microbatch) + encoder_replica
        messages.target[entry] = _first_target(forms, state, microbatch) + replica
        state.entry[microbatch, encoder_replica, replica] = entry
    if has_message:
        seconds = forms.bridge_latency_s[encoder_replica, replica]
        messages.seconds[entry] = seconds + forms.bridge_token_s[encoder_replica, replica] * tokens
        return
    # The last message of the list takes the place of the removed one.
    messages.count[own_list] -= np.uint64(1)
    last = np.int64(messages.first[own_list] + messages.count[own_list])
    its_source, its_target = np.int64(messages.source[last]), np.int64(messages.target[last])
    messages.source[entry], messages.target[entry] = messages.source[last], messages.target[last]
    messages.seconds[entry] = messages.seconds[last]
    its_replicas = (
        its_source - _first_source(forms, state, encoder, microbatch),
        its_target - _first_target(forms, state, microbatch),
    )
    state.entry[microbatch, its_replicas[0], its_replicas[1]] = entry
    state.entry[microbatch, encoder_replica, replica] = -1


@kernel(inline="always")
def _first_source(forms, state, encoder, microbatch):
    """The cell of an encoder's replica in its last stage, less the replica's number among those of all encoders."""
    stage = forms.first_stage[encoder + 1] - 1
    first_cell = forms.stages[stage, FIRST_NODE] * state.count.shape[1] + microbatch * forms.stages[stage, DP]
    return first_cell - forms.first_replica[encoder]


@kernel(inline="always")
def _first_target(forms, state, microbatch):
    """The cell of the LLM's first replica in its first stage."""
    stage = forms.first_stage[len(forms.first_stage) - 2]
    return forms.stages[stage, FIRST_NODE] * state.count.shape[1] + microbatch * forms.stages[stage, DP]
