"""Global batches are a seeded shuffle: each epoch holds each sample once, and any step can be asked for by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.runtime import UserError
from dflop.scheduling import GlobalBatches

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
