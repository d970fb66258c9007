"""Global batches are a seeded shuffle: each epoch holds each sample once, and any step can be asked for by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.schedule import GlobalBatches
from dflop.schedule.global_batches import EvaluationBatches
from dflop.shapes import Mixture

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


@given(size=sizes(), seed=seeds, data=st.data(), step=st.integers(0, 20))
def test_samples_that_are_left_out_are_drawn_by_none_and_the_others_keep_their_order(size, seed, data, step):
    num_samples, _ = size
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, num_samples - 1), min_size=1))))
    of_all = GlobalBatches(num_samples, num_samples, seed)[step]
    of_kept = GlobalBatches(len(kept), len(kept), seed, among=(kept, num_samples))[step]
    assert kept[of_kept].tolist() == [sample for sample in of_all if sample in kept]


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


@st.composite
def mixtures(draw) -> tuple[np.ndarray, Mixture]:
    """The source of each sample, and how often sources are drawn: by epochs, or by weights."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    of_source = {f"s{number}": draw(st.floats(0.2, 4)) for number in range(len(sizes))}
    source = draw(st.permutations([name for name, size in zip(of_source, sizes, strict=True) for _ in range(size)]))
    return np.array(source), Mixture(of_source, {}) if draw(st.booleans()) else Mixture({}, of_source)


@given(mixture=mixtures(), seed=seeds, num_epochs=st.integers(1, 5))
def test_after_whole_epochs_each_source_is_drawn_as_often_as_it_asks_for_and_its_samples_equally_often(
    mixture, seed, num_epochs
):
    source, mix = mixture
    draws = mix.draws(source)
    batch_size = int(min(len(source), sum(count for _, count in draws)))
    if not batch_size:
        return
    batches = GlobalBatches(len(source), batch_size, seed, draws)
    wanted = [int(num_epochs * count + 1e-6) for _, count in draws]
    stream = np.concatenate([batches[step] for step in range(-(-sum(wanted) // batch_size))])[: sum(wanted)]
    times = np.bincount(stream, minlength=len(source))
    assert [times[index].sum() for index, _ in draws] == wanted
    assert all(np.ptp(times[index]) <= 1 for index, _ in draws)


@given(mixture=mixtures(), seed=seeds, steps=st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_a_step_of_a_mixture_is_the_same_whatever_was_asked_before(mixture, seed, steps):
    source, mix = mixture
    draws = mix.draws(source)
    batch_size = int(min(len(source), sum(count for _, count in draws)))
    if batch_size:
        batches = GlobalBatches(len(source), batch_size, seed, draws)
        for step in steps:
            np.testing.assert_array_equal(batches[step], GlobalBatches(len(source), batch_size, seed, draws)[step])
            assert len(batches[step]) == batch_size


def test_sources_drawn_once_are_drawn_as_without_a_mixture():
    source = np.array(["a", "b", "a", "b", "b"] * 8)
    mixed = GlobalBatches(40, 7, 3, Mixture({"a": 1.0}, {}).draws(source))
    for step in range(20):
        np.testing.assert_array_equal(mixed[step], GlobalBatches(40, 7, 3)[step])


def test_weights_are_shares_of_what_is_drawn_whatever_the_sources_sizes():
    source = np.array(["small"] * 10 + ["large"] * 990)
    batches = GlobalBatches(1000, 100, 0, Mixture({}, {"small": 3.0, "large": 1.0}).draws(source))
    assert sum((batches[step] < 10).sum() for step in range(10)) == 750
    assert batches.steps_in(1) == 10


def test_a_batch_larger_than_an_epoch_says_so():
    draws = Mixture({"a": 0.2}, {}).draws(np.array(["a"] * 10))
    with pytest.raises(UserError, match=r"size` is 4, but an epoch draws only 2 samples; lower it"):
        GlobalBatches(10, 4, 0, draws)
