"""Passes of modules whose parameters are sharded: as long as a walk along both streams takes, and bounded by either."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.costs import PARTS, Moving, StageKind, resident_parts, sharded_passes, working_bytes
from dflop.plan.layout_key import LayoutKey

UNITS = ("first", "layer", "last")
seconds = st.floats(0.0, 5.0)
of_parts = st.fixed_dictionaries(dict.fromkeys(PARTS, seconds))
of_units = st.fixed_dictionaries(dict.fromkeys(UNITS, seconds))


def whole(num_layers: int, module: str = "llm", **how) -> StageKind:
    return StageKind.whole(module, LayoutKey(), num_layers, **how)


def walk(units, computing_s, moves_s, exposed_s):
    """Unit by unit: `moves_s[place]` is moved while unit `place` is computed, and the next one waits for both."""
    clock = exposed_s
    for unit, moved_s in zip(units, moves_s, strict=True):
        clock += max(computing_s[unit], moved_s)
    return clock


@given(num_layers=st.integers(1, 5), computing_s=of_parts, gather_s=of_units, reduce_s=of_units)
def test_a_pass_takes_what_a_walk_along_its_units_takes(num_layers, computing_s, gather_s, reduce_s):
    forward, backward = sharded_passes(whole(num_layers), Moving(gather_s, reduce_s))
    units = ["first", *["layer"] * num_layers, "last"]
    gathers = [*(gather_s[unit] for unit in units[1:]), 0.0]
    forward_s = walk(units, computing_s, gathers, gather_s["first"]) + computing_s["stage"]
    assert forward.seconds(computing_s) == pytest.approx(forward_s)
    # The unit before is gathered, and the gradients of the unit behind are summed; nothing is behind the last one.
    back = units[::-1]
    moves = [
        (gather_s[back[place + 1]] if place + 1 < len(back) else 0.0) + (reduce_s[back[place - 1]] if place else 0.0)
        for place in range(len(back))
    ]
    backward_s = walk(back, computing_s, moves, reduce_s["first"]) + computing_s["stage"]
    assert backward.seconds(computing_s) == pytest.approx(backward_s)
    # What is not hidden comes on top of all computing.
    alone_s = sum(computing_s[unit] for unit in units) + computing_s["stage"]
    in_turn = sharded_passes(whole(num_layers), Moving(gather_s, reduce_s), is_hidden=False)
    assert in_turn[0].seconds(computing_s) == pytest.approx(alone_s + gather_s["first"] + sum(gathers))
    assert in_turn[1].seconds(computing_s) == pytest.approx(alone_s + reduce_s["first"] + sum(moves))


@given(num_layers=st.integers(1, 5), computing_s=of_parts)
def test_where_moving_takes_no_time_a_pass_is_the_sum_of_its_parts(num_layers, computing_s):
    nothing = dict.fromkeys(UNITS, 0.0)
    for own in sharded_passes(whole(num_layers), Moving(nothing, nothing)):
        assert own.seconds(computing_s) == pytest.approx(whole(num_layers).total(computing_s))


@given(num_layers=st.integers(1, 5), a=of_parts, b=of_parts, gather_s=of_units, reduce_s=of_units)
def test_passes_are_convex_in_what_their_parts_take(num_layers, a, b, gather_s, reduce_s):
    middle = {part: (a[part] + b[part]) / 2 for part in PARTS}
    for own in sharded_passes(whole(num_layers), Moving(gather_s, reduce_s)):
        assert own.seconds(middle) <= (own.seconds(a) + own.seconds(b)) / 2 + 1e-9


def test_parameters_move_in_the_precision_that_is_computed_in_and_gradients_in_fp32():
    sizes = {"stage": 0.0, "first": 400.0, "layer": 40.0, "last": 4.0}
    how = {"latency_s": 2.0, "byte_s": 1.0}
    half = Moving.over(sizes, **how, value_bytes=2, trained_bytes=sizes)
    assert half.gather_s == {"first": 101.0, "layer": 11.0, "last": 2.0}  # half of a sync of 200, 20 and 2 bytes
    assert half.reduce_s == {"first": 201.0, "layer": 21.0, "last": 3.0}
    frozen = Moving.over(sizes, **how, value_bytes=4, trained_bytes=dict.fromkeys(sizes, 0.0))
    assert frozen.gather_s == half.reduce_s
    assert not any(frozen.reduce_s.values())
    doubles = Moving.over(sizes, **how, value_bytes=8, trained_bytes=sizes)
    assert doubles.gather_s == doubles.reduce_s == {"first": 401.0, "layer": 41.0, "last": 5.0}


def test_several_layouts_are_asked_for_at_once():
    sizes = dict.fromkeys(PARTS, 100.0)
    byte_s = np.array([[0.1], [1.0]])
    moving = Moving.over(sizes, 0.0 * byte_s, byte_s, value_bytes=4, trained_bytes=sizes)
    part_s = dict.fromkeys(PARTS, np.array([[7.0], [7.0]]))
    for place, own in enumerate(byte_s[:, 0]):
        alone = Moving.over(sizes, 0.0, own, value_bytes=4, trained_bytes=sizes)
        for all_, one in zip(sharded_passes(whole(3), moving), sharded_passes(whole(3), alone), strict=True):
            assert all_.seconds(part_s)[place] == pytest.approx(one.seconds(dict.fromkeys(PARTS, np.array([7.0]))))


def test_a_rank_holds_its_share_and_while_it_computes_the_units_at_hand():
    assert sum(resident_parts(400.0, 0.0, 8, num_shards=8, value_bytes=4)) == 4 * 400 / 8
    assert sum(resident_parts(400.0, 0.0, 8, num_shards=4, value_bytes=4)) == 4 * 400 / 4  # each node has a copy
    assert sum(resident_parts(0.0, 400.0, 8, num_shards=8, value_bytes=4)) == 50


def test_passes_need_the_units_at_hand_and_the_gradients_on_their_way():
    def of(module: str, last: float, **how) -> dict[str, float]:
        sizes = {"stage": 0.0, "first": 400.0, "layer": 40.0, "last": last}
        return working_bytes(module, sizes, **{"value_bytes": 2, "trained_bytes": sizes} | how)

    # An embedding of 100 values and a head of 101 are units of their own beside layers of 10.
    assert of("llm", 404.0) == {"stage": 6 * 101, "layer": 2 * 2 * 10 + 4 * 101, "first": 2 * 100, "last": 2 * 101}
    assert of("llm", 404.0, value_bytes=4)["stage"] == 8 * 101
    assert of("llm", 404.0, trained_bytes=dict.fromkeys(PARTS, 0.0))["layer"] == 2 * (10 + 101)
    # Large layers have all of their gradients beside those of the one behind.
    sizes = {"stage": 0.0, "first": 4.0, "layer": 400.0, "last": 4.0}
    assert (
        working_bytes("vision", sizes, value_bytes=2, trained_bytes=sizes)["stage"] == 2 * (2 + 3 * 100 + 1) + 4 * 100
    )
    # A tied embedding stays gathered from forward to backward, as what stands at an encoder's ends does.
    assert of("llm", 4.0) == of("vision", 4.0)
    assert of("llm", 4.0)["stage"] == 6 * 101
    assert of("llm", 4.0)["layer"] == 2 * (101 + 2 * 10 + 1) + 4 * 10
    assert of("llm", 4.0)["first"] == of("llm", 4.0)["last"] == 2 * 101
