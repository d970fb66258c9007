"""Schedules of models with no encoder and with several: each sample has a place in each, in files and messages."""

import itertools

import numpy as np
import pytest
from encoders import ENCODERS, costs_with, plan_with, samples_with, spec_with

from dflop.config import ClusterConfig, ScheduleConfig
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer, StepSchedule, preview_frames
from dflop.step import nodes_of

CLUSTER = ClusterConfig(num_nodes=2, devices_per_node=8, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0)


@pytest.fixture(
    params=list(itertools.product(ENCODERS, ["disjoint", "colocated", "bubble_filled", "monolithic"])),
    ids=lambda own: f"{'+'.join(own[0]) or 'none'}, {own[1]}",
)
def scheduled(request, costs, tiny_spec, draw_samples):
    """The first step of a model with these encoders, and the scheduler that decided it."""
    encoders, placement = request.param
    plan = plan_with(encoders, placement, "1f1b", dp=2, num_microbatches=4)
    samples = samples_with(draw_samples, encoders, 80, seed=1)
    pricer = Pricer(plan, costs_with(costs, encoders), spec_with(tiny_spec, encoders), CLUSTER)
    scheduler = BatchScheduler(samples, pricer, GlobalBatches(80, 32, 0), ScheduleConfig(policy="lpt"), 0)
    return scheduler, scheduler.schedule(0)


def test_balanced_batches_take_less_than_drawn_ones_and_searched_ones_less_again(scheduled):
    scheduler, schedule = scheduled
    searched = scheduler.schedule(0, "search")
    assert schedule.lower_bound_s <= searched.step_s <= schedule.step_s <= scheduler.schedule(0, "random").step_s
    for own in (schedule, searched):
        assert own.step_s == pytest.approx(scheduler.pricer.step_s(own.shapes, own.assignment))


def test_a_schedule_is_the_same_after_it_was_sent(scheduled):
    _, schedule = scheduled
    received = StepSchedule.from_bytes(schedule.to_bytes())
    assert received.encoders == schedule.encoders
    for name in ("encoder_rank", "num_items", "kept_tokens", "llm_dp_rank", "sample_id"):
        sent, own = getattr(schedule, name), getattr(received, name)
        assert own.shape == sent.shape
        np.testing.assert_array_equal(own, sent)


def test_the_preview_has_a_column_of_ranks_for_each_encoder(scheduled):
    scheduler, schedule = scheduled
    samples, _, _ = preview_frames([schedule], nodes_of(scheduler.pricer.plan))
    columns = [name for name in samples.columns if name.endswith("_rank") and name != "llm_dp_rank"]
    assert columns == ["encoder_rank", "audio_rank", "depth_rank"][: len(schedule.encoders)]
    np.testing.assert_array_equal(samples["num_items"], schedule.num_items.sum(axis=1))
    for column, ranks in zip(columns, schedule.encoder_rank.T, strict=True):
        np.testing.assert_array_equal(samples[column], ranks)
