"""A schedule regroups the batch and loses nothing; better policies are never priced above worse ones."""

import dataclasses

import numpy as np
import pytest
from small_plans import disjoint

from dflop.balance import balanced_cells, bucket_loads, drawn_in_turns, lpt_buckets
from dflop.base import UserError
from dflop.config import ClusterConfig, ModelConfig, ScheduleConfig
from dflop.models import load_model_spec
from dflop.plan import Grid, Plan
from dflop.schedule import Assignment, BatchScheduler, GlobalBatches, Pricer, StepSchedule, preview_frames
from dflop.step import nodes_of

POLICIES = ("random", "lpt", "ilp")
LAYOUTS = {"even": (1, 1, 1), "one to two": (1, 2, 2), "two to one": (2, 2, 1), "three to two": (3, 2, 2)}
NUM_STEPS = 6
CLUSTER = ClusterConfig(devices_per_node=8, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0)


def plan_of(schedule: StepSchedule) -> Plan:
    """The layout that a schedule is for: no two of them have as many nodes."""
    plans = {len(nodes_of(plan)): plan for plan in (disjoint(*layout) for layout in LAYOUTS.values())}
    return plans[len(schedule.forward_s)]


@pytest.fixture(scope="module")
def make_scheduler(costs, tiny_spec, draw_samples):
    def make(
        plan: Plan,
        policy: str = "lpt",
        seed: int = 0,
        batch_size: int = 32,
        cluster: ClusterConfig = CLUSTER,
        goes_on: bool = False,
        **more,
    ) -> BatchScheduler:
        samples = draw_samples(150, seed=1)
        pricer = Pricer(
            plan,
            costs,
            tiny_spec,
            cluster,
        )
        config = ScheduleConfig(policy=policy, time_limit_s=0.15, **more)
        return BatchScheduler(samples, pricer, GlobalBatches(150, batch_size, seed), config, seed, goes_on=goes_on)

    return make


@pytest.fixture(scope="module", params=LAYOUTS)
def schedules(request, make_scheduler) -> dict[str, list[StepSchedule]]:
    """Each policy's first steps under one layout."""
    with make_scheduler(disjoint(*LAYOUTS[request.param])).open() as scheduler:
        return {policy: [scheduler.schedule(step, policy) for step in range(NUM_STEPS)] for policy in POLICIES}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_schedule_holds_each_sample_of_its_global_batch_once(schedules, draw_samples, policy):
    samples = draw_samples(150, seed=1)
    for schedule in schedules[policy]:
        index = GlobalBatches(150, 32, 0)[schedule.step]
        assert sorted(schedule.sample_id) == sorted(samples.sample_id[index])
        assert len(set(schedule.sample_id)) == 32
        place = {name: number for number, name in enumerate(samples.sample_id)}
        own = [place[name] for name in schedule.sample_id]
        for name in ("row", "num_items", "kept_tokens", "llm_tokens", "target_tokens"):
            np.testing.assert_array_equal(getattr(schedule, name), getattr(samples, name)[own])


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_come_by_replica_microbatch_and_position(schedules, policy):
    for schedule in schedules[policy]:
        keys = list(zip(schedule.llm_dp_rank, schedule.microbatch, schedule.position, strict=True))
        assert keys == sorted(set(keys))
        for llm_dp_rank, microbatch, position in keys:
            assert position == 0 or (llm_dp_rank, microbatch, position - 1) in keys


def test_ilp_is_never_priced_above_lpt(schedules):
    for ilp, lpt in zip(schedules["ilp"], schedules["lpt"], strict=True):
        assert ilp.step_s <= lpt.step_s * (1 + 1e-12)


@pytest.mark.parametrize("policy", ["search", "ilp"])
def test_replicas_that_meet_in_every_microbatch_are_never_worse_off_than_with_the_samplers_batches(
    make_scheduler, policy
):
    grid = {"num_ranks": 4, "sharding": "parameters"}
    plan = Plan(
        placement="monolithic",
        grids=(Grid(module="vision", **grid), Grid(module="llm", **grid)),
        num_microbatches=2,
    )
    scheduler = make_scheduler(plan, policy, search_trials=20)
    with scheduler.open():
        for step in range(NUM_STEPS):
            batch = scheduler.samples.take(scheduler.batches[step])
            cells = balanced_cells(scheduler.pricer.problem(batch).loads_s, 4, len(batch) // 8)
            microbatch, rank = np.divmod(cells, 4)
            of_sampler = scheduler.pricer.step_s(batch, scheduler.pricer.assign(batch, rank, microbatch))
            assert scheduler.schedule(step).step_s <= of_sampler * (1 + 1e-12)


@pytest.mark.parametrize("placement", ["monolithic", "colocated"])
def test_replicas_that_meet_in_every_microbatch_are_never_worse_off_than_with_like_loads_together(
    make_scheduler, placement
):
    grid = {"num_ranks": 8, "sharding": "parameters"}
    grids = Grid(module="vision", **grid), Grid(module="llm", **grid)
    plan = Plan(placement=placement, grids=grids, num_microbatches=2)
    scheduler = make_scheduler(plan, "search", batch_size=100, search_trials=0)
    for step in range(NUM_STEPS):
        batch = scheduler.samples.take(scheduler.batches[step])
        problem = scheduler.pricer.problem(batch)
        for loads_s in (problem.loads_s, problem.loads_s[:, -1:]):  # encoders deal media anew
            packed = dataclasses.replace(problem, loads_s=loads_s)
            bucket = lpt_buckets(packed)
            groups = drawn_in_turns(bucket, bucket_loads(packed, bucket).sum(axis=1), 8)
            together_s = scheduler.pricer.step_s(batch, scheduler.pricer.assign(batch, *groups))
            assert scheduler.schedule(step).step_s <= together_s * (1 + 1e-12)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_schedule_says_of_itself_holds(schedules, policy):
    for schedule in schedules[policy]:
        assert schedule.policy == policy
        begins = {
            "random": "random",
            "lpt": ("lpt", "as priced"),
            "ilp": ("lpt, ilp ", "small ends, ilp ", "as priced, ilp "),
        }
        assert schedule.status.startswith(begins[policy])
        assert schedule.lower_bound_s <= schedule.step_s * (1 + 1e-9)
        assert 0 <= schedule.idle < 1
        busy_s = (schedule.forward_s + schedule.backward_s).sum(axis=1)
        assert (busy_s <= schedule.step_s * (1 + 1e-9)).all()
        assert schedule.deciding_s > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_predicted_times_are_those_of_what_the_schedule_holds(schedules, make_scheduler, draw_samples, policy):
    """Priced anew from the lines that the ranks will read."""
    pricer = make_scheduler(plan_of(schedules[policy][0])).pricer
    for schedule in schedules[policy]:
        held = draw_samples(150, seed=1).take(schedule.row)
        assignment = Assignment(
            llm_dp_rank=schedule.llm_dp_rank, microbatch=schedule.microbatch, encoder_rank=schedule.encoder_rank
        )
        times = pricer.stage_times(held, assignment)
        np.testing.assert_allclose(times.forward_s, schedule.forward_s)
        np.testing.assert_allclose(times.backward_s, schedule.backward_s)
        assert pricer.step_s(held, assignment) == pytest.approx(schedule.step_s)


def test_the_order_of_microbatches_is_never_worse_than_the_one_they_were_packed_in(make_scheduler):
    scheduler = make_scheduler(disjoint(1, 2, 1, num_microbatches=8))
    gained = []
    for step in range(NUM_STEPS):
        shapes = scheduler.samples.take(scheduler.batches[step])
        buckets = lpt_buckets(scheduler.pricer.problem(shapes))
        as_packed = scheduler.pricer.assign(shapes, np.zeros(len(buckets), dtype=np.int64), buckets)
        gained.append(scheduler.pricer.step_s(shapes, as_packed) / scheduler.schedule(step).step_s)
    assert min(gained) >= 1 - 1e-12
    assert max(gained) > 1.01


def test_a_run_whose_batches_cannot_all_be_scheduled_is_known_before_it_starts(make_scheduler):
    make_scheduler(disjoint(1, 1, 1), batch_size=4).check(3)
    with pytest.raises(UserError, match="cannot fill 4 buckets"):
        make_scheduler(disjoint(1, 1, 1), batch_size=3).check(3)


def test_a_schedule_comes_back_from_its_bytes_with_its_types(schedules):
    for schedule in schedules["lpt"]:
        again = StepSchedule.from_bytes(schedule.to_bytes())
        assert again.to_bytes() == schedule.to_bytes()
        for name in (item.name for item in dataclasses.fields(schedule) if item.name != "media"):
            mine, other = getattr(schedule, name), getattr(again, name)
            np.testing.assert_array_equal(mine, other)
            assert np.asarray(mine).shape == np.asarray(other).shape
            if name not in ("sample_id", "source"):
                assert np.asarray(mine).dtype == np.asarray(other).dtype, name
                assert np.asarray(other).flags.aligned, name  # as kernels were compiled for
        for mine, other in zip(schedule.media.of_each(), again.media.of_each(), strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("policy", ["random", "lpt"])
def test_a_step_is_scheduled_the_same_in_whatever_order_steps_are_asked_for(make_scheduler, policy):
    plan = disjoint(2, 2, 2)
    first, second = make_scheduler(plan, policy), make_scheduler(plan, policy)
    one = {step: first.schedule(step) for step in (0, 1, 2)}
    two = {step: second.schedule(step) for step in (2, 0)}
    for step, schedule in two.items():
        for name in ("sample_id", "llm_dp_rank", "microbatch", "encoder_rank", "forward_s"):
            np.testing.assert_array_equal(getattr(schedule, name), getattr(one[step], name))


def test_a_policy_asked_for_by_name_goes_before_the_configured_one(make_scheduler):
    scheduler = make_scheduler(disjoint(1, 1, 2), "random")
    assert scheduler.schedule(0).policy == "random"
    assert scheduler.schedule(0, "lpt").policy == "lpt"


def test_in_training_on_gpus_a_search_goes_on_while_it_gains_and_the_predicted_step_lasts(make_scheduler):
    plan = disjoint(2, 2, 2)
    gpus = dataclasses.replace(CLUSTER, device="cuda", device_model="h100-80g")

    def scheduled_s(cluster: ClusterConfig, goes_on: bool, costs_share: float = 1.0) -> list[float]:
        scheduler = make_scheduler(plan, "search", search_trials=100, goes_on=goes_on, cluster=cluster)
        if costs_share != 1.0:
            times = {key: costs_share * fit for key, fit in scheduler.pricer.costs.times.items()}
            costs = dataclasses.replace(scheduler.pricer.costs, times=times)
            scheduler.pricer = Pricer(plan, costs, load_model_spec(ModelConfig(preset="tiny")), cluster)
        return [scheduler.schedule(step).step_s for step in range(NUM_STEPS)]

    first, more = (scheduled_s(gpus, goes_on) for goes_on in (False, True))
    assert all(later <= sooner for later, sooner in zip(more, first, strict=True))
    assert np.mean(more) < 0.998 * np.mean(first)
    # Cores that compute the step, and a step that is over before a round ends, leave no time.
    assert scheduled_s(CLUSTER, True) == scheduled_s(CLUSTER, False)
    assert scheduled_s(gpus, True, 1e-6) == scheduled_s(gpus, False, 1e-6)


def test_closing_ends_the_solvers_process_and_a_later_step_starts_another(make_scheduler):
    scheduler = make_scheduler(disjoint(1, 1, 1, num_microbatches=8), "ilp", batch_size=16)
    with scheduler.open():
        scheduler.schedule(0)
        assert scheduler._cbc is not None
    assert scheduler._cbc is None
    with scheduler.open():
        assert "ilp" in scheduler.schedule(1).status


def test_the_preview_has_a_row_a_sample_and_a_row_a_stage_and_microbatch(schedules, make_scheduler):
    listed = schedules["lpt"]
    plan = plan_of(listed[0])
    samples, stages, steps = preview_frames(listed, nodes_of(plan))
    assert samples.columns[:7] == [
        "step",
        "sample_id",
        "llm_dp_rank",
        "microbatch",
        "position",
        "num_items",
        "llm_tokens",
    ]
    assert len(samples) == NUM_STEPS * 32
    assert stages.columns == [
        *("step", "module", "dp_rank", "pp_stage", "microbatch", "forward_s", "backward_s", "extrapolated"),
    ]
    assert len(stages) == NUM_STEPS * len(nodes_of(plan)) * 4
    assert stages["forward_s"].sum() == pytest.approx(sum(schedule.forward_s.sum() for schedule in listed))
    assert stages["extrapolated"].sum() == sum(schedule.extrapolated.sum() for schedule in listed)
    assert steps["step"].to_list() == list(range(NUM_STEPS))
    assert steps["gap"].to_list() == [schedule.step_s / schedule.lower_bound_s for schedule in listed]
    assert steps["idle"].to_list() == [schedule.idle for schedule in listed]


def test_a_search_has_fewer_trials_where_there_are_many_buckets(make_scheduler):
    few = make_scheduler(disjoint(1, 1, 4, 4), "search")
    many = make_scheduler(disjoint(1, 1, 64, 16), "search")
    assert (few.num_trials, many.num_trials) == (8000, 2000)
