"""Dealing shares: each sample goes where a scan of all buckets finds the least, though most buckets are passed over."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.plan import Grid
from dflop.schedule.sharing import deal_shares


def least_of_all(loads, row_bytes, degree, llm, num_microbatches, most_bytes):
    """`deal_shares` in plain words."""
    held = np.zeros((llm.dp, num_microbatches, loads.shape[1]))
    filled = np.zeros((llm.dp, num_microbatches))
    first = np.cumsum(degree) - degree
    of_samples = np.array([loads[row : row + size].max() for row, size in zip(first, degree, strict=True)])
    replica, microbatch = np.zeros((2, len(loads)), dtype=int)
    totals, slowest = np.zeros(llm.dp // llm.num_meeting), np.zeros((llm.dp // llm.num_meeting, num_microbatches))
    for number, sample in enumerate(np.lexsort((-of_samples, -degree))):
        rows = slice(first[sample], first[sample] + degree[sample])
        fills_empty = (filled == 0).sum() >= len(degree) - number
        found = []
        for begin in range(0, llm.dp - degree[sample] + 1, degree[sample]):
            places, group = slice(begin, begin + degree[sample]), begin // llm.num_meeting
            for own in range(num_microbatches):
                after = (held[places, own] + loads[rows]).max()
                now = filled[places, own]
                exceeds = ((now > 0) & (fills_empty | (now + row_bytes[rows] > most_bytes))).any()
                total = totals[group] + max(0.0, after - slowest[group, own])
                found.append((exceeds, total, after, begin, own))
        _, totals_after, after, begin, own = min(found, key=lambda cell: cell[:3])
        places, group = slice(begin, begin + degree[sample]), begin // llm.num_meeting
        totals[group], slowest[group, own] = totals_after, max(slowest[group, own], after)
        replica[rows], microbatch[rows] = np.arange(begin, begin + degree[sample]), own
        filled[places, own] += row_bytes[rows]
        held[places, own] += loads[rows]
    return replica, microbatch


# So many replicas that some blocks of them are not full, and groups that meet end within a block, or span several.
LAYOUTS = [
    Grid(module="llm", num_ranks=40, sharding="parameters"),
    Grid(module="llm", num_ranks=40, sharding="hybrid", shards=8),
    Grid(module="llm", num_ranks=36, sharding="hybrid", shards=12),
    Grid(module="llm", num_ranks=20),
]


@pytest.mark.parametrize("llm", LAYOUTS, ids=str)
@settings(max_examples=40)  # the scan of all takes long
@given(seed=st.integers(0, 2**32 - 1), num_microbatches=st.integers(1, 3), fill=st.sampled_from([0.8, 1.2, np.inf]))
def test_each_sample_goes_into_the_best_of_all_buckets(llm, seed, num_microbatches, fill):
    rng = np.random.default_rng(seed)
    degree = rng.choice([1, 1, 1, 2, 4, rng.choice([4, 16])], size=rng.integers(1, 3 * llm.dp * num_microbatches))
    shape = degree.sum(), 2
    loads = rng.lognormal(size=shape) if rng.random() < 0.5 else rng.integers(0, 4, shape).astype(float)
    row_bytes = rng.lognormal(size=len(loads))
    most_bytes = fill * row_bytes.sum() / (llm.dp * num_microbatches)
    dealt = deal_shares(loads, row_bytes, degree, llm, num_microbatches, most_bytes)
    expected = least_of_all(loads, row_bytes, degree, llm, num_microbatches, most_bytes)
    np.testing.assert_array_equal(dealt, expected)
