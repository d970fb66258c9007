"""Schedules of plans in which replicas share long samples: whole, held by memory, and no slower than without."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest
import yaml
from click.testing import CliRunner
from long_samples import samples_of

from dflop.base import UserError
from dflop.cli import cli
from dflop.config import AudioConfig, ClusterConfig, ScheduleConfig
from dflop.plan import Grid, Plan
from dflop.report.schedules import price_preview
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer, StepSchedule, preview_frames
from dflop.schedule.memory_limit import fits
from dflop.schedule.step_search import StepSearch
from dflop.shapes import SampleShapes
from dflop.shapes.reader import MediumSize
from dflop.step import nodes_of

CLUSTER = ClusterConfig(devices_per_node=8, memory_gib=4.0, intra_node_gbps=1000.0, inter_node_gbps=50.0)
BATCH_SIZE, NUM_STEPS = 32, 3
LAYOUTS = {
    "replicas": {"num_ranks": 4},
    "pipelines": {"num_ranks": 8, "pp": 2},
    "shared parameters": {"num_ranks": 4, "sharding": "parameters"},
}


def plan_of(layout: str, cp: int, num_microbatches: int = 4) -> Plan:
    sizes = LAYOUTS[layout]
    encoder = Grid(module="vision", num_ranks=sizes["num_ranks"])
    llm = Grid(module="llm", cp=cp, **sizes)
    return Plan(placement="colocated", grids=(encoder, llm), num_microbatches=num_microbatches)


@pytest.fixture(scope="module")
def samples(tiny_spec) -> SampleShapes:
    """A few clips with much to say among pictures and texts."""
    rng = np.random.default_rng(0)
    media, words = [], []
    for number in range(150):
        picture = [MediumSize(int(rng.integers(30, 300)), int(rng.integers(30, 300)), 0)] * int(rng.integers(0, 3))
        is_long = number % 20 == 7
        media.append([MediumSize(64, 48, int(rng.integers(20, 32)), 500_000, 0, 2_000_000)] if is_long else picture)
        words.append(int(rng.integers(2000, 6000) if is_long else rng.integers(20, 200)))
    return samples_of(tiny_spec, media, words)


@pytest.fixture(scope="module")
def make_scheduler(costs, tiny_spec, samples):
    def make(plan: Plan, policy: str = "lpt", cluster: ClusterConfig = CLUSTER, samples=samples, batch_size=BATCH_SIZE):
        pricer = Pricer(plan, costs, tiny_spec, cluster, audio=AudioConfig())
        config = ScheduleConfig(policy=policy, time_limit_s=0.15, search_trials=500)
        return BatchScheduler(samples, pricer, GlobalBatches(len(samples), batch_size, 0), config, 0)

    return make


def check_shares(schedule: StepSchedule, samples: SampleShapes, cp: int) -> None:
    """Each sample is there once, and its shares are neighbours of one group in one microbatch."""
    drawn = samples.take(np.isin(samples.sample_id, schedule.sample_id))
    assert schedule.num_samples == BATCH_SIZE == len(drawn)
    shared = schedule.shared_samples()
    assert sorted(row for rows in shared for row in rows) == np.flatnonzero(schedule.degree > 1).tolist()
    for rows in shared:
        assert len(set(schedule.sample_id[rows])) == len(set(schedule.microbatch[rows])) == 1
        assert schedule.share[rows].tolist() == list(range(len(rows)))
        first = schedule.llm_dp_rank[rows[0]]
        assert schedule.llm_dp_rank[rows].tolist() == list(range(first, first + len(rows)))
        assert first // cp == (first + len(rows) - 1) // cp
        assert first % len(rows) == 0
    for name in ("llm_tokens", "target_tokens", "kept_tokens", "num_items"):
        values, whole = getattr(schedule, name), getattr(drawn, name)
        for sample_id, own in zip(drawn.sample_id, whole, strict=True):
            np.testing.assert_array_equal(values[schedule.sample_id == sample_id].sum(axis=0), own)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["by_length", "lpt", "search", "ilp"])
def test_long_samples_are_shared_by_neighbours_and_the_step_is_shorter(make_scheduler, samples, policy, layout, cp):
    with (
        make_scheduler(plan_of(layout, cp), policy).open() as sharing,
        make_scheduler(plan_of(layout, 1), policy).open() as plain,
    ):
        shared, whole = ([own.schedule(step) for step in range(NUM_STEPS)] for own in (sharing, plain))
    for schedule in shared:
        if schedule.degree is not None:
            check_shares(schedule, samples, cp)
    if policy == "by_length":
        return  # it keeps its microbatches
    assert sum(schedule.step_s for schedule in shared) < 0.9 * sum(schedule.step_s for schedule in whole)
    assert max(schedule.degree.max() for schedule in shared) == cp


@pytest.fixture
def with_room_for(make_scheduler, samples):
    """A scheduler whose devices hold a part of what the longest sample alone needs."""
    plan = plan_of("replicas", 4)
    roomy = make_scheduler(plan).pricer
    longest = samples.take(samples.llm_tokens.argsort()[-1:])
    needed = max(roomy.memory_bytes(longest, roomy.assign(longest, np.array([0]), np.array([0]))).values())

    def make(part: float, policy: str) -> BatchScheduler:
        return make_scheduler(plan, policy, replace(CLUSTER, memory_gib=part * needed / 2**30))

    return make


def test_where_memory_is_scarce_shares_hold_it(with_room_for, samples):
    scheduler = with_room_for(0.6, "search")
    for step in range(NUM_STEPS):
        schedule = scheduler.schedule(step)
        assert fits(scheduler.pricer, schedule.shapes, schedule.assignment)
        check_shares(schedule, samples, 4)


@pytest.mark.parametrize("policy", ["lpt", "search"])
def test_a_check_says_which_batches_can_be_scheduled(with_room_for, policy):
    verdicts = set()
    for part in np.linspace(0.4, 0.9, 11):
        scheduler = with_room_for(part, policy)
        fullest = scheduler.fullest(NUM_STEPS, 2)
        with nullcontext() if (can_be := can_schedule(scheduler, fullest)) else pytest.raises(UserError):
            scheduler.check(NUM_STEPS, 2)
        if policy == "search" and can_be and not can_schedule(with_room_for(part, "lpt"), fullest):
            with pytest.raises(UserError):
                scheduler.check(NUM_STEPS, 2, searches=False)
            verdicts.add("only a search")
        verdicts.add(can_be)
    assert verdicts == {True, False} | ({"only a search"} if policy == "search" else set())


def can_schedule(scheduler: BatchScheduler, steps: list[int]) -> bool:
    try:
        for step in steps:
            scheduler.schedule(step)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("policy", ["lpt", "search"])
def test_batches_without_long_samples_are_scheduled_as_without_cp(make_scheduler, tiny_spec, policy):
    words = np.random.default_rng(0).integers(90, 110, 512).tolist()
    even = samples_of(tiny_spec, [[]] * 512, words)
    one, other = (
        make_scheduler(plan_of("replicas", cp, 2), policy, samples=even, batch_size=256).schedule(0) for cp in (1, 4)
    )
    assert other.degree is None
    assert sorted(one.sample_id) == sorted(other.sample_id)
    assert other.step_s == pytest.approx(one.step_s, rel=0.002)  # replicas that might share are priced in lock-step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_search_moves_whole_samples_and_no_share(make_scheduler, layout):
    scheduler = make_scheduler(plan_of(layout, 4))
    schedule = scheduler.schedule(0)
    shapes, before = schedule.shapes, schedule.assignment
    is_share = schedule.degree > 1
    # Whole samples in one place leave much to gain.
    spoilt = scheduler.pricer.assign(
        shapes, np.where(is_share, before.llm_dp_rank, np.arange(len(shapes)) % 2), before.microbatch
    )
    found, found_s = StepSearch(scheduler.pricer, shapes).improve(spoilt, 4000, 0)
    assert found_s < scheduler.pricer.step_s(shapes, spoilt)
    moved = found.llm_dp_rank != spoilt.llm_dp_rank
    assert moved.any()
    assert not moved[is_share].any()
    for rows in schedule.shared_samples():  # they may change places with all others of another microbatch
        assert len(set(found.microbatch[rows])) == 1


def test_the_preview_tells_shares_and_the_report_prices_them_as_they_were_scheduled(make_scheduler):
    scheduler = make_scheduler(plan_of("replicas", 4), "search")
    schedules = [scheduler.schedule(step) for step in range(NUM_STEPS)]
    table, _, _ = preview_frames(schedules, nodes_of(scheduler.pricer.plan))
    assert table["degree"].to_list() == np.concatenate([own.degree for own in schedules]).tolist()
    assert table["share"].to_list() == np.concatenate([own.share for own in schedules]).tolist()
    prices = price_preview(scheduler, table, Path("schedule.parquet"))
    assert prices.step_s == pytest.approx(np.mean([own.step_s for own in schedules]))
    held = [max(scheduler.pricer.memory_bytes(own.shapes, own.assignment).values()) for own in schedules]
    assert prices.memory_bytes == pytest.approx(max(held))


def test_the_command_says_how_many_samples_are_shared_and_writes_their_shares(make_run):
    run = make_run(batch_size=24)
    with duckdb.connect(str(run.paths["shapes"])) as connection:
        tokens = "CASE WHEN row % 20 = 3 THEN 9000 ELSE 100 END"
        connection.execute(f"UPDATE samples SET num_items = 0, kept_vision_tokens = 0, llm_tokens = {tokens}")
    grids = Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=2, rank_offset=1, cp=2)
    plan = Plan(placement="disjoint", grids=grids, num_microbatches=2)
    run.paths["plan"].write_text(yaml.safe_dump({"plan": plan.to_dict()}))
    out = run.paths["plan"].with_name("schedule.parquet")
    command = ["schedule", "--config", json.dumps(run.config), "--batches", "2", "--out", str(out)]
    for name in ("shapes", "costs", "plan"):
        command += [f"--{name}", str(run.paths[name])]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    table = pl.read_parquet(out)
    num_shared = len(table.filter(degree=2, share=0))
    assert num_shared > 0
    assert f"{num_shared} long samples over up to 2 replicas of the LLM each" in done.output
    assert table.filter(share=0)["step"].value_counts()["count"].to_list() == [24, 24]
