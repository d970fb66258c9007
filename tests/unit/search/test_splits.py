"""Uneven splits make the slowest stage as fast as layers can, where embedding and head weigh on the ends."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import bent_costs, make_config, uneven_samples

from dflop.plan.layout_key import LayoutKey
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.splits import balanced_splits, least_slowest

extras = st.lists(st.floats(0, 6), min_size=1, max_size=4).map(np.array)


def even(num_layers: int, num_stages: int) -> np.ndarray:
    small, more = divmod(num_layers, num_stages)
    return small + (np.arange(num_stages) < more)


@given(extra=extras, more=st.integers(0, 6))
def test_no_split_has_a_faster_slowest_stage(extra, more):
    """Held against all splits there are."""
    num_layers, num_stages = len(extra) + more, len(extra)
    counts = least_slowest(num_layers, extra)
    assert sum(counts) == num_layers
    assert min(counts) >= 1
    splits = (
        split for split in itertools.product(range(1, num_layers + 1), repeat=num_stages) if sum(split) == num_layers
    )
    assert max(counts + extra) == min(max(split + extra) for split in splits)
    assert max(counts + extra) <= max(even(num_layers, num_stages) + extra)


def test_of_equal_splits_the_later_stage_has_the_more_layers():
    """It has fewer microbatches in flight."""
    assert least_slowest(5, np.zeros(2)) == (2, 3)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_splits_are_listed_where_they_are_not_the_even_ones(tiny_spec, seed):
    costs, samples = bent_costs(seed), uneven_samples(40, seed)
    config = make_config(6, 8)
    batches = GroupedBatches(config, tiny_spec, costs, samples)
    splits = balanced_splits(config, tiny_spec, costs, batches)
    for (layout, pp), counts in splits.items():
        assert layout in (LayoutKey(), LayoutKey(2))
        assert len(counts) == pp <= 4
        assert sum(counts) == tiny_spec.module("llm").num_layers
        assert counts != tuple(even(4, pp))


def test_a_heavy_head_spares_its_stage(tiny_spec, costs, samples):
    times = {
        key: fit if key[:1] + key[2:3] != ("llm", "last") else type(fit)(fit.const, (0, 0, 0, 4e-4))
        for key, fit in costs.times.items()
    }
    heavy = type(costs)(
        times=times,
        activations=costs.activations,
        transients=costs.transients,
        parameter_bytes=costs.parameter_bytes,
    )
    config = make_config(4, 8)
    splits = balanced_splits(config, tiny_spec, heavy, GroupedBatches(config, tiny_spec, heavy, samples))
    assert splits[LayoutKey(), 2] == (3, 1)
