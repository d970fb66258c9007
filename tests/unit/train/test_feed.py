"""Jobs: what the schedule gives each worker to load is each sample once, in the places its neighbours expect."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch.distributed as dist
from small_plans import disjoint

from dflop.base import UserError
from dflop.config import ClusterConfig, ScheduleConfig
from dflop.plan import Plan
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer, StepSchedule
from dflop.shapes.reader import MediumSize
from dflop.step import Node, nodes_of
from dflop.train.feed import JobStream, ScheduleFeed, job_of, samples_of

LAYOUTS = {"even": (1, 1, 1), "one to two": (1, 1, 2), "two to one": (2, 2, 1), "three to two": (3, 1, 2)}
NUM_MICROBATCHES = 4


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request, costs, tiny_spec, draw_samples) -> tuple[Plan, list[StepSchedule]]:
    plan = disjoint(*LAYOUTS[request.param], NUM_MICROBATCHES)
    samples = draw_samples(80, seed=4)
    pricer = Pricer(
        plan,
        costs,
        tiny_spec,
        ClusterConfig(devices_per_node=8, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0),
    )
    scheduler = BatchScheduler(samples, pricer, GlobalBatches(80, 24, 0), ScheduleConfig(policy="lpt"), 0)
    return plan, [scheduler.schedule(step) for step in range(3)]


def jobs_of(plan: Plan, schedule: StepSchedule, module: str, pp_stage: int = 0) -> list[tuple]:
    """(dp rank, microbatch, job) of every replica of one stage."""
    return [
        (node.dp_rank, microbatch, job_of(schedule, node, microbatch))
        for node in nodes_of(plan)
        if node.module == module and node.pp_stage == pp_stage
        for microbatch in range(NUM_MICROBATCHES)
    ]


def test_every_sample_with_media_goes_to_exactly_one_encoder(case):
    plan, schedules = case
    for schedule in schedules:
        encoded = Counter(ref.row for _, _, job in jobs_of(plan, schedule, "vision") for ref in job.samples)
        assert encoded == Counter(schedule.row[schedule.num_items[:, 0] > 0].tolist())
        assert set(encoded.values()) == {1}


def test_every_sample_is_learned_by_exactly_one_replica(case):
    plan, schedules = case
    for schedule in schedules:
        learned = Counter(ref.row for _, _, job in jobs_of(plan, schedule, "llm") for ref in job.samples)
        assert learned == Counter(schedule.row.tolist())
        assert set(learned.values()) == {1}


def test_all_stages_of_a_replica_have_the_same_samples(case):
    plan, schedules = case
    for stage in range(plan.grid("llm").pp):
        assert jobs_of(plan, schedules[0], "llm", stage) == jobs_of(plan, schedules[0], "llm")


def test_an_encoder_sends_its_samples_in_the_order_in_which_each_replica_packs_them(case):
    """Features carry no names: both ends must list the samples of a bridge alike."""
    plan, schedules = case
    for schedule in schedules:
        replica_of = dict(zip(schedule.row.tolist(), schedule.llm_dp_rank.tolist(), strict=True))
        items_of = dict(zip(schedule.row.tolist(), schedule.num_items[:, 0].tolist(), strict=True))
        for encoder, microbatch, sent in jobs_of(plan, schedule, "vision"):
            for replica, other, text in jobs_of(plan, schedule, "llm"):
                if other != microbatch:
                    continue
                expected = [
                    (ref.row, kept)
                    for ref, (kept,), (rank,) in zip(text.samples, text.kept_tokens, text.encoder_rank, strict=True)
                    if rank == encoder and items_of[ref.row]
                ]
                assert expected == [
                    (ref.row, kept)
                    for ref, (kept,) in zip(sent.samples, sent.kept_tokens, strict=True)
                    if replica_of[ref.row] == replica
                ]


def test_what_is_said_of_a_sample_is_what_the_schedule_says(case):
    plan, schedules = case
    schedule = schedules[0]
    kept = dict(zip(schedule.row.tolist(), schedule.kept_tokens[:, 0].tolist(), strict=True))
    lengths = dict(zip(schedule.row.tolist(), schedule.llm_tokens.tolist(), strict=True))
    sizes = dict(zip(schedule.row.tolist(), (each.tolist() for each in schedule.media.of_each()), strict=True))
    for module in ("vision", "llm"):
        for _, microbatch, job in jobs_of(plan, schedule, module):
            assert [(kept[ref.row],) for ref in job.samples] == list(job.kept_tokens)
            assert [lengths[ref.row] for ref in job.samples] == list(job.llm_tokens)
            expected = [tuple(MediumSize(*size) for size in sizes[ref.row]) for ref in job.samples]
            assert list(job.media) == expected
            assert {ref.source for ref in job.samples} <= {"drawn"}
            assert {int(schedule.microbatch[schedule.row == ref.row][0]) for ref in job.samples} <= {microbatch}


def test_masks_of_all_workers_cover_the_batch(case):
    plan, schedules = case
    schedule = schedules[0]
    masks = [
        samples_of(schedule, node, microbatch)
        for node in nodes_of(plan)
        if (node.module, node.pp_stage) == ("llm", 0)
        for microbatch in range(NUM_MICROBATCHES)
    ]
    np.testing.assert_array_equal(np.sum(masks, axis=0), np.ones(len(schedule.row)))


def test_a_stream_is_the_jobs_of_a_ranks_forwards_in_their_order_step_after_step(case):
    plan, schedules = case
    store = dist.HashStore()
    for schedule in schedules:
        store.set(f"schedule/{schedule.step}", schedule.to_bytes())
    node = nodes_of(plan)[-1]
    feed = ScheduleFeed(store)
    other = nodes_of(plan)[0]
    forwards = ((other, 0), (other, 1), (node, 0), (other, 2), (node, 1))
    stream = list(JobStream(feed, lambda slots: forwards, range(1, 3)))
    assert stream == [
        (own, job_of(schedule, own, microbatch)) for schedule in schedules[1:] for own, microbatch in forwards
    ]
    assert set(feed.waited_s) == {1, 2}
    feed.forget(1)
    assert set(feed.waited_s) == {2}


def test_a_rank_that_reads_no_records_waits_for_no_schedule():
    feed = ScheduleFeed(dist.HashStore())  # which holds none, and would be waited for
    assert list(JobStream(feed, lambda slots: (), range(1000))) == []


def test_a_schedule_without_sizes_of_media_says_what_to_run(case):
    _, (schedule, *_) = case
    with pytest.raises(UserError, match=r"shapes.duckdb holds no sizes of media; .*`dflop profile-shapes`"):
        job_of(dataclasses.replace(schedule, media=None), Node("llm", 0, 0), 0)


def test_a_step_that_could_not_be_scheduled_tells_every_rank_why():
    store = dist.HashStore()
    store.set("schedule/0", "failed: UserError: too few samples")
    with pytest.raises(UserError, match="step 1 could not be scheduled: UserError: too few samples"):
        ScheduleFeed(store).get(0)


def test_a_feed_reads_a_step_once(case):
    _, schedules = case
    store = dist.HashStore()
    store.set("schedule/0", schedules[0].to_bytes())
    feed = ScheduleFeed(store)
    first = feed.get(0)
    store.set("schedule/0", dataclasses.replace(schedules[0], step=7).to_bytes())
    assert feed.get(0) is first
    feed.forget(0)
    assert feed.get(0).step == 7
