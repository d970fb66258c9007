"""Global batches are a seeded shuffle: each epoch holds each sample once, and any step can be asked for by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.schedule import GlobalBatches
from dflop.schedule.global_batches import EvaluationBatches

seeds = st.integers(0, 2**32)


@st.composite
def sizes(draw) -> tuple[int, int]:
    num_samples = draw(st.integers(1, 60))
    return num_samples, draw(st.integers(1, num_samples))


@given(size=sizes(), seed=seeds, num_epochs=st.integers(1, 4))
def test_every_epoch_holds_every_sample_once(size, seed, num_epochs):
    num_samples, global_batch_size = size
    batches = GlobalBatches(num_samples, global_batch_size, seed)
    num_steps = -(-num_samples * num_epochs // global_batch_size)
    stream = np.concatenate([batches[step] for step in range(num_steps)])[: num_samples * num_epochs]
    for epoch in stream.reshape(num_epochs, num_samples):
        assert sorted(epoch) == list(range(num_samples))


@given(size=sizes(), seed=seeds, steps=st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_a_step_is_the_same_whatever_was_asked_before(size, seed, steps):
    batches = GlobalBatches(*size, seed)
    for step in steps:
        np.testing.assert_array_equal(batches[step], GlobalBatches(*size, seed)[step])
        assert len(batches[step]) == size[1]


def test_another_seed_or_epoch_shuffles_otherwise():
    batches = GlobalBatches(100, 100, seed=0)
    assert batches[0].tolist() != batches[1].tolist()
    assert batches[0].tolist() != GlobalBatches(100, 100, seed=1)[0].tolist()
    assert batches[0].tolist() != list(range(100))


def test_a_batch_larger_than_the_data_says_what_would_fit():
    with pytest.raises(UserError, match=r"size` is 11, but there are only 10 samples; lower it to 10"):
        GlobalBatches(10, 11, seed=0)


@given(size=sizes(), num_epochs=st.integers(1, 4))
def test_so_many_steps_as_an_epoch_has_draw_every_sample_once_and_one_less_does_not(size, num_epochs):
    batches = GlobalBatches(*size, seed=0)
    steps = batches.steps_in(num_epochs)
    assert steps * size[1] >= num_epochs * size[0] > (steps - 1) * size[1]
    assert batches.steps_in(1e-9) == 1


@given(num_samples=st.integers(1, 300), global_batch_size=st.integers(1, 64), num_buckets=st.integers(1, 64))
def test_evaluation_batches_hold_every_sample_once_and_fill_all_buckets(num_samples, global_batch_size, num_buckets):
    if num_samples < num_buckets:
        with pytest.raises(UserError, match=f"{num_samples} samples are held out for evaluation"):
            EvaluationBatches(num_samples, global_batch_size, num_buckets)
        return
    batches = EvaluationBatches(num_samples, global_batch_size, num_buckets)
    parts = [batches[number] for number in range(len(batches))]
    assert np.concatenate(parts).tolist() == list(range(num_samples))
    assert min(map(len, parts)) >= num_buckets
    if num_buckets * 2 <= global_batch_size:
        assert max(map(len, parts)) <= global_batch_size
