"""Encoders in bubbles: orders found for a batch's times, which hold what they say and gain what they can."""

import dataclasses

import numpy as np
import pytest
from drawn_plans import frozen_sets, plans
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulate import draw_times

from dflop.base import UserError
from dflop.plan import Grid, Plan
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.step import (
    Bridges,
    BubbleFiller,
    StageTimes,
    check_program,
    compile_plan,
    make_program,
    nodes_of,
    peak_bytes,
    simulate,
    simulate_step_s,
)


def filled(pp: int, num_microbatches: int, dp: int = 1, tp: int = 1, encoder_tp: int = 1, **more) -> Plan:
    grids = (
        Grid(module="vision", num_ranks=pp * dp * tp, tp=encoder_tp),
        Grid(module="llm", num_ranks=pp * dp * tp, tp=tp, pp=pp),
    )
    return Plan(placement="bubble_filled", grids=grids, num_microbatches=num_microbatches, **more)


def times_of(plan: Plan, encoder_s: float) -> StageTimes:
    """An LLM stage's forward takes 1 s; backwards take twice as long as forwards."""
    forward_s = np.full((len(nodes_of(plan)), plan.num_microbatches), encoder_s)
    forward_s[[index for index, node in enumerate(nodes_of(plan)) if node.module == "llm"]] = 1.0
    return StageTimes(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        chain_s=np.zeros_like(forward_s),
        bridges=Bridges.none(),
        sync_s=np.zeros(len(forward_s)),
    )


@settings(max_examples=50)
@given(plan=plans(placements=["bubble_filled"]), frozen=frozen_sets, seed=st.integers(0, 1000), data=st.data())
def test_slots_of_any_times_make_programs_that_pass_the_check(plan, frozen, seed, data):
    times = draw_times(plan, np.random.default_rng(seed), 0.5)
    slots = BubbleFiller(plan, TrainedSet(frozen)).slots(times, data.draw(st.integers(1, plan.num_microbatches)))
    check_program(plan, make_program(plan, TrainedSet(frozen), slots), TrainedSet(frozen))


@given(plan=plans(placements=["bubble_filled"]), seed=st.integers(0, 1000))
def test_no_rank_ever_holds_more_than_in_the_colocated_order(plan, seed):
    times = draw_times(plan, np.random.default_rng(seed), 0.5)
    slots = BubbleFiller(plan).slots(times, plan.num_microbatches)
    order, colocated = compile_plan(plan, EVERYTHING, slots), compile_plan(plan)
    kept = np.random.default_rng(seed).random(times.forward_s.shape)
    held, most = (peak_bytes(own, kept, 0 * kept, 0 * kept) for own in (order, colocated))
    assert (held <= most + 1e-9).all()


@given(plan=plans(placements=["bubble_filled"]), seed=st.integers(0, 1000))
def test_without_slots_a_step_is_that_of_the_colocated_plan(plan, seed):
    times = draw_times(plan, np.random.default_rng(seed), 0.5)
    colocated = compile_plan(dataclasses.replace(plan, placement="colocated"))
    assert simulate_step_s(compile_plan(plan), times) == simulate_step_s(colocated, times)
    assert simulate(compile_plan(plan), times).idle == pytest.approx(simulate(colocated, times).idle)


@pytest.mark.parametrize("encoder_s", [0.1, 0.25, 1.0])
def test_a_step_of_four_stages_and_sixteen_microbatches_gets_shorter(encoder_s):
    plan = filled(4, 16)
    times = times_of(plan, encoder_s)
    slots = BubbleFiller(plan).slots(times, 16)
    colocated, own = (simulate(compile_plan(plan, EVERYTHING, given), times) for given in (None, slots))
    # What a rank waits while its pipeline fills and drains is three microbatches' work at most.
    assert own.step_s <= colocated.step_s - 0.25 * min(9.0, 3 * 16 * encoder_s)


def test_a_rank_holds_few_microbatches_of_the_encoders_where_it_must():
    plan = filled(4, 32)
    times = times_of(plan, 0.25)
    one_item = np.zeros_like(times.forward_s)
    one_item[[index for index, node in enumerate(nodes_of(plan)) if node.module == "vision"]] = 1.0
    held = []
    for most in (8, 16, 32):
        order = compile_plan(plan, EVERYTHING, BubbleFiller(plan).slots(times, most))
        held.append(peak_bytes(order, one_item, 0 * one_item, 0 * one_item).max())
        # Of a slot, forwards come first: that is one or two more than was asked for.
        assert held[-1] <= most + 2
        assert simulate_step_s(order, times) <= simulate_step_s(compile_plan(plan), times)
    assert held[0] < held[1] < held[2]


def test_an_encoder_whose_replicas_would_lie_on_two_stages_is_refused():
    with pytest.raises(UserError, match=r"tp=2 would lie on several of the LLM's stages of 1 ranks.*colocated"):
        filled(2, 4, encoder_tp=2)
    assert filled(2, 4, dp=2, encoder_tp=2).world_size == 4


def test_an_encoder_whose_replicas_meet_in_every_pass_is_refused():
    vision, llm = filled(2, 4).grids
    with pytest.raises(UserError, match=r"vision: with sharding: parameters .* use sharding: optimizer, or placement"):
        dataclasses.replace(filled(2, 4), grids=(dataclasses.replace(vision, sharding="parameters"), llm))
