"""Offloaded layers leave one after another, and never take more of the device than the layers behind them will."""

from hypothesis import given
from hypothesis import strategies as st

from dflop.plan.leaving import leaves_behind, most_hidden, most_still_here


@st.composite
def stages(draw):
    num_layers = draw(st.integers(2, 100))
    return draw(st.integers(1, num_layers - 1)), num_layers


@given(stages())
def test_all_have_left_before_the_last_layer_computes_where_it_can_be(stage):
    num_offloaded, num_layers = stage
    ends = leaves_behind(*stage)
    assert list(ends) == sorted(ends)
    assert all(place < end < num_layers for place, end in enumerate(ends))
    assert ends[-1] == (num_layers - 2 if num_offloaded < num_layers - 1 else num_layers - 1)


@given(stages())
def test_at_no_layer_is_more_on_the_device_than_at_the_last(stage):
    num_offloaded, num_layers = stage
    for layer in range(num_offloaded, num_layers):
        num_free = num_layers - 1 - layer  # of the kept layers behind
        assert most_still_here(num_offloaded, num_layers, layer) <= max(num_free, 1)


@given(st.integers(3, 100), st.floats(0.1, 100))
def test_copies_of_so_many_layers_are_made_in_time(num_layers, copy_of_forward):
    num_offloaded = most_hidden(num_layers, copy_of_forward)
    now = 0.0
    for place, end in enumerate(leaves_behind(num_offloaded, num_layers)):
        now = max(now, place + 1) + copy_of_forward  # copies follow one another, each behind its layer's forward
        assert now <= end + 1 + 1e-6
