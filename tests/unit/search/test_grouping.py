"""How a global batch is regrouped for pricing: each sample once, evenly, small microbatches at both ends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import make_config, uneven_samples

from dflop.balance import BY_LENGTH, LPT, RANDOM, packing, quick_buckets
from dflop.base import UserError
from dflop.schedule import GlobalBatches
from dflop.search.grouped_batches import GroupedBatches

layouts = st.tuples(st.integers(1, 5), st.integers(1, 8), st.integers(0, 20)).map(
    lambda sizes: (sizes[0], sizes[1], sizes[0] * sizes[1] + sizes[2])
)


def loads_drawn(num_samples: int, seed: int) -> np.ndarray:
    """[num_samples, 2], a few of them far larger; one module may have nothing to do."""
    rng = np.random.default_rng(seed)
    return rng.lognormal(0, 1.5, (num_samples, 2)) * (rng.random((num_samples, 2)) < 0.8) * [1, seed % 3 > 0]


@pytest.fixture(scope="module")
def grouped(costs, tiny_spec):
    def group(batch_size: int, seed: int) -> GroupedBatches:
        return GroupedBatches(make_config(2, batch_size), tiny_spec, costs, uneven_samples(80, seed))

    return group


@settings(max_examples=60)
@given(layout=layouts, seed=st.integers(0, 10**6))
def test_each_sample_has_one_bucket_and_no_bucket_is_empty(grouped, layout, seed):
    dp, num_microbatches, batch_size = layout
    batches = grouped(batch_size, seed)
    for policy in (LPT, RANDOM, BY_LENGTH):
        rank, microbatch = batches.group(policy, 1, dp, num_microbatches)
        assert rank.shape == microbatch.shape == (batch_size,)
        count = np.zeros((dp, num_microbatches), dtype=int)
        np.add.at(count, (rank, microbatch), 1)
        assert count.min() >= 1
        if policy is RANDOM:
            assert count.max() - count.min() <= 1


@settings(max_examples=60)
@given(layout=layouts, seed=st.integers(0, 10**6))
def test_small_microbatches_stand_at_both_ends_of_every_replica(grouped, layout, seed):
    """Along a replica's microbatches loads rise to one peak and fall again."""
    dp, num_microbatches, batch_size = layout
    batches = grouped(batch_size, seed)
    rank, microbatch = batches.group(LPT, 0, dp, num_microbatches)
    loads_s = batches.drawn[0].loads_s
    bucket = quick_buckets(loads_s, dp * num_microbatches)
    load = np.bincount(bucket, weights=loads_s.sum(axis=1))
    of_place = np.zeros((dp, num_microbatches))
    of_place[rank, microbatch] = load[bucket]
    for along in of_place:
        peak = int(along.argmax())
        assert (np.diff(along[: peak + 1]) >= 0).all()
        assert (np.diff(along[peak:]) <= 0).all()
    assert sorted(of_place.ravel()) == pytest.approx(sorted(load))


@pytest.mark.parametrize("most_places", [0, packing._MOST_PLACES], ids=["on the least loaded", "where it suits best"])
@settings(max_examples=80)
@given(num_buckets=st.integers(1, 12), more=st.integers(0, 40), seed=st.integers(0, 10**6))
def test_quick_buckets_are_as_even_as_the_largest_sample_lets_them(most_places, num_buckets, more, seed):
    """Graham's argument: before its last sample came, the fullest bucket was among the least loaded, so that it exceeds
    the others by no more than that sample. With two modules "least loaded" is by the larger of both, relative to
    their means, and the mean of that is at most the sum of the modules' means."""
    loads_s = loads_drawn(num_buckets + more, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_MOST_PLACES", most_places)
        bucket = quick_buckets(loads_s, num_buckets)
    assert sorted(set(bucket.tolist())) == list(range(num_buckets))
    mean_s = loads_s.mean(axis=0)
    weighted = np.divide(loads_s, mean_s, out=np.zeros_like(loads_s), where=mean_s > 0)
    sums = np.column_stack([np.bincount(bucket, weights=own, minlength=num_buckets) for own in weighted.T])
    assert sums.max() <= weighted.sum() / num_buckets + weighted.max() + 1e-9


@settings(max_examples=80)
@given(num_buckets=st.integers(1, 12), more=st.integers(0, 40), seed=st.integers(0, 10**6))
def test_quick_buckets_are_those_of_the_packing_that_also_knows_weights_and_caps(num_buckets, more, seed):
    """Loads are a few whole numbers, so that many buckets are equally good."""
    loads_s = np.random.default_rng(seed).integers(0, 4, (num_buckets + more, 2)).astype(float)
    weighted = loads_s / np.where(loads_s.any(axis=0), loads_s.mean(axis=0), 1.0)
    order = np.argsort(-weighted.max(axis=1), kind="stable")
    nothing, empty = np.zeros(len(loads_s), dtype=np.int64), np.zeros((num_buckets, 2))
    bucket = packing._place(weighted, np.ones(2), nothing, order, empty, packing.NO_CAP)
    assert quick_buckets(loads_s, num_buckets).tolist() == bucket.tolist()


@pytest.mark.parametrize("most_places", [0, packing._MOST_PLACES])
def test_quick_buckets_of_one_module_are_longest_processing_time_first(monkeypatch, most_places):
    """7, 6, 5, 4 and 3 in two buckets: 7 + 4 + 3 and 6 + 5."""
    monkeypatch.setattr(packing, "_MOST_PLACES", most_places)
    loads_s = np.array([[3.0], [7.0], [5.0], [4.0], [6.0]])
    bucket = quick_buckets(loads_s, 2)
    assert {frozenset(loads_s[bucket == own, 0].tolist()) for own in (0, 1)} == {
        frozenset({7, 4, 3}),
        frozenset({6, 5}),
    }


def test_the_batches_are_the_first_that_training_draws(costs, tiny_spec, samples):
    config = make_config(2, 8, search_batches=4)
    batches = GroupedBatches(config, tiny_spec, costs, samples)
    drawn = GlobalBatches(len(samples), 8, config.seed)
    assert len(batches) == 4
    for step, shapes in enumerate(batches.shapes):
        assert shapes.row.tolist() == drawn[step].tolist()


@pytest.mark.parametrize(("batch_size", "num_batches"), [(2, 16), (512, 8), (1024, 4), (4096, 2)])
def test_the_larger_a_batch_is_the_fewer_are_looked_at(costs, tiny_spec, batch_size, num_batches):
    config = make_config(2, batch_size, search_batches=None)
    assert len(GroupedBatches(config, tiny_spec, costs, uneven_samples(batch_size, 1))) == num_batches


@pytest.mark.parametrize(
    ("num_samples", "complaint"),
    [
        (0, "there are no samples to draw a global batch from; add data"),
        (7, "`train.global_batch_size` is 8, but there are only 7 samples; lower it to 7 or add data"),
    ],
)
def test_fewer_samples_than_a_batch_are_told(costs, tiny_spec, num_samples, complaint):
    with pytest.raises(UserError) as caught:
        GroupedBatches(make_config(2, 8), tiny_spec, costs, uneven_samples(8, 1).take(np.arange(num_samples)))
    assert complaint in str(caught.value)
