"""Packings of others: what each promises."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflop.comparison.packing import contiguous, differencing, longest_first

LOADS = st.lists(st.integers(1, 1000), min_size=4, max_size=14).map(lambda loads: np.array(loads, dtype=np.float64))


def sums_of(loads: np.ndarray, bucket: np.ndarray, num_buckets: int) -> np.ndarray:
    assert np.bincount(bucket, minlength=num_buckets).min() >= 1
    assert bucket.max() < num_buckets
    return np.bincount(bucket, weights=loads, minlength=num_buckets)


@given(LOADS, st.integers(1, 4))
def test_the_longest_first_are_within_four_thirds_of_the_least_possible(loads, num_buckets):
    sums = sums_of(loads, longest_first(loads, num_buckets), num_buckets)
    longest = np.sort(loads)[::-1]
    # Of the longest ones, more than buckets, two must share one.
    least = max(loads.sum() / num_buckets, longest[0])
    if len(loads) > num_buckets:
        least = max(least, longest[num_buckets - 1] + longest[num_buckets])
    assert sums.max() <= least + longest[0]
    if len(loads) <= 2 * num_buckets:
        assert sums.max() <= 4 / 3 * least + 1e-9


@given(LOADS, st.integers(1, 4))
def test_equally_many_are_packed_where_that_is_asked_for(loads, num_buckets):
    counts = np.bincount(longest_first(loads, num_buckets, equally_many=True), minlength=num_buckets)
    assert counts.max() <= -(-len(loads) // num_buckets)


def test_what_buckets_hold_already_counts():
    assert longest_first(np.array([3.0, 2.0]), 2, np.array([9.0, 0.0])).tolist() == [1, 1]


@given(LOADS, st.integers(1, 4))
def test_a_cut_in_order_is_the_best_of_all_cuts(loads, num_buckets):
    bucket = contiguous(loads, num_buckets)
    assert (np.diff(bucket) >= 0).all()
    largest = sums_of(loads, bucket, num_buckets).max()
    cuts = itertools.combinations(range(1, len(loads)), num_buckets - 1)
    best = min(max(part.sum() for part in np.split(loads, cut)) for cut in cuts)
    assert largest <= best * (1 + 1e-9)


@given(LOADS, st.integers(1, 4))
def test_differencing_packs_everything_and_is_never_worse_than_the_largest_and_an_even_part_together(
    loads, num_buckets
):
    sums = sums_of(loads, differencing(loads, num_buckets), num_buckets)
    assert sums.max() <= loads.sum() / num_buckets + loads.max() + 1e-9


def test_differencing_gives_each_sample_a_bucket_where_there_are_enough():
    assert len(set(differencing(np.array([5.0, 5.0, 1.0]), 7).tolist())) == 3


def test_differencing_finds_what_the_longest_first_do_not():
    loads = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    assert sums_of(loads, differencing(loads, 2), 2).max() == 16
    assert sums_of(loads, longest_first(loads, 2), 2).max() == 17
