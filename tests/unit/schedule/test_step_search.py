"""The search on the simulated step prices as the pricer does and never ends worse; what it aims at is no illusion."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from encoders import costs_of_squares, with_squares
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.balance import bucket_loads, lpt_buckets
from dflop.config import ClusterConfig, ModelConfig
from dflop.models import load_model_spec
from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.schedule import Pricer, StepSearch
from dflop.schedule.microbatch_sizes import ideal_shares

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from relaxed_step import relaxed_step_s

CLUSTER = ClusterConfig(devices_per_node=4, memory_gib=64.0, intra_node_gbps=100.0, inter_node_gbps=50.0)
# Devices that sum gradients beside the last backward; the links are so slow that this is not all of it.
GPUS = dataclasses.replace(CLUSTER, device_model="h100-80g", intra_node_gbps=0.05, inter_node_gbps=0.02)


def make_plan(
    placement="disjoint", *, vision_dp=2, vision_pp=1, llm_dp=2, llm_pp=2, schedule="1f1b", num_chunks=1
) -> Plan:
    num_ranks = llm_dp * llm_pp
    encoders = {"disjoint": vision_dp * vision_pp, "monolithic": llm_dp}.get(placement, num_ranks)
    return Plan(
        placement=placement,
        grids=(
            Grid(module="vision", num_ranks=encoders, pp=vision_pp if placement == "disjoint" else 1),
            Grid(module="llm", num_ranks=num_ranks, pp=llm_pp, rank_offset=encoders if placement == "disjoint" else 0),
        ),
        num_microbatches=4,
        schedule=schedule,
        num_chunks=num_chunks,
    )


def sharing(plan: Plan, *shardings: str) -> Plan:
    """The plan, each module sharing parameters in its own way."""
    grids = (
        dataclasses.replace(grid, sharding=own, shards=2 if own == "hybrid" else None)
        for grid, own in zip(plan.grids, shardings, strict=True)
    )
    return dataclasses.replace(plan, grids=tuple(grids))


PLANS = {
    "disjoint": make_plan(),
    "encoder in two stages": make_plan(vision_pp=2),
    "gpipe": make_plan(schedule="gpipe", llm_pp=3),
    "interleaved": make_plan(schedule="interleaved_1f1b", num_chunks=2),
    "colocated": make_plan("colocated"),
    "bubble-filled": make_plan("bubble_filled"),
    "monolithic": make_plan("monolithic"),
    "one stage": make_plan(llm_pp=1, llm_dp=3),
    "shared": sharing(make_plan("monolithic", llm_pp=1, llm_dp=4), "parameters", "parameters"),
    "shared apart": sharing(make_plan("disjoint", llm_pp=1, llm_dp=4), "parameters", "hybrid"),
    "encoder shared": sharing(make_plan("colocated"), "hybrid", "optimizer"),
}


@pytest.fixture(scope="module")
def start(costs, tiny_spec, draw_samples):
    """A search over a batch, with the pricer, the shapes, and where a balanced packing begins."""

    def prepare(plan, seed=0, num_samples=32, cluster=CLUSTER, frozen=(), model=costs, squares=False):
        pricer = Pricer(
            plan, costs_of_squares(model) if squares else model, tiny_spec, cluster, trained=TrainedSet(frozen)
        )
        shapes = draw_samples(num_samples, seed)
        shapes = with_squares(shapes, seed) if squares else shapes
        problem = pricer.problem(shapes)
        rank, microbatch = np.divmod(lpt_buckets(problem), plan.num_microbatches)
        return (
            StepSearch(pricer, shapes),
            pricer,
            shapes,
            pricer.assign(shapes, rank, microbatch),
        )

    return prepare


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("frozen", "squares", "cluster"),
    [((), False, CLUSTER), (("vision",), False, CLUSTER), ((), True, CLUSTER), ((), False, GPUS)],
    ids=["plain", "frozen", "squares", "syncs beside backward"],
)
def test_every_placement_and_schedule_is_priced_as_the_pricer_does(start, name, frozen, squares, cluster):
    search, pricer, shapes, first = start(PLANS[name], frozen=frozen, squares=squares, cluster=cluster)
    assert search.step_s(first) == pytest.approx(pricer.step_s(shapes, first), rel=1e-12)
    found, found_s = search.improve(first, 400, seed=1)
    assert found_s == pytest.approx(pricer.step_s(shapes, found), rel=1e-12)


@settings(max_examples=30)
@given(name=st.sampled_from(sorted(PLANS)), seed=st.integers(0, 99), num_trials=st.integers(0, 300))
def test_the_search_never_ends_worse_and_every_sample_stays_in_one_bucket(start, name, seed, num_trials):
    search, _, shapes, first = start(PLANS[name], seed, num_samples=20)
    found, found_s = search.improve(first, num_trials, seed)
    assert found_s <= search.step_s(first)
    plan = PLANS[name]
    buckets = found.llm_dp_rank * plan.num_microbatches + found.microbatch
    assert len(buckets) == len(shapes)
    assert set(buckets) == set(range(plan.num_buckets))
    assert set(found.encoder_rank[:, 0]) <= set(range(plan.grids[0].dp))
    if plan.placement == "monolithic":
        assert (found.encoder_rank[:, 0] == found.llm_dp_rank).all()


def test_an_encoders_runs_count_in_its_stages_and_in_the_bound(start):
    without, with_them = (start(PLANS["disjoint"], squares=squares) for squares in (False, True))
    assert with_them[0].step_s(with_them[3]) > 1.1 * without[0].step_s(without[3])
    assert with_them[1].lower_bound_s(with_them[2]) > without[1].lower_bound_s(without[2])


def test_a_step_in_bubbles_is_shorter_than_any_found_with_the_colocated_order(start):
    plan = make_plan("bubble_filled", llm_pp=4, llm_dp=1)
    search, _, _, first = start(plan, num_samples=48)
    colocated, *_ = start(make_plan("colocated", llm_pp=4, llm_dp=1), num_samples=48)
    found, found_s = search.improve(first, 2000, seed=0)
    assert found.slots is not None
    assert found.slots.shape == (2, 4, plan.num_microbatches)
    assert found_s < 0.99 * colocated.improve(dataclasses.replace(first, slots=None), 2000, seed=0)[1]


def test_more_trials_never_end_worse_and_shorten_the_step(start):
    search, _, _, first = start(PLANS["disjoint"], num_samples=64)
    steps = [search.improve(first, num_trials, seed=3)[1] for num_trials in (0, 100, 1000, 5000)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 0.97 * steps[0]


def test_equal_questions_have_equal_answers(start):
    search, _, _, first = start(PLANS["disjoint"])
    once, again = (search.improve(first, 500, seed=7) for _ in range(2))
    assert once[1] == again[1]
    for field in dataclasses.fields(once[0]):
        np.testing.assert_array_equal(getattr(once[0], field.name), getattr(again[0], field.name))


def fullest_bytes(pricer, shapes, assignment) -> float:
    return max(pricer.memory_bytes(shapes, assignment).values())


def with_memory(pricer, num_bytes: float) -> Pricer:
    """The same plan on devices of so many bytes."""
    cluster = dataclasses.replace(CLUSTER, memory_gib=num_bytes / 2**30)
    return Pricer(pricer.plan, pricer.costs, load_model_spec(ModelConfig(preset="tiny")), cluster)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("frozen", [(), ("vision",)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_the_pricers_to_the_byte(start, costs, name, frozen, device):
    """At exactly as many bytes as an assignment takes, the search finds that it fits, and with 0.1 % fewer it does
    not. GPUs have communicators, and slots for messages."""
    here, model = dataclasses.replace(CLUSTER, device=device), dataclasses.replace(costs, communicator_bytes=1e5)
    _, pricer, shapes, first = start(PLANS[name], frozen=frozen, num_samples=40, cluster=here, model=model)
    needed = fullest_bytes(pricer, shapes, first)
    for share, fits in ((1 + 1e-6, True), (0.999, False)):
        cluster = dataclasses.replace(here, memory_gib=needed * share / 2**30)
        limited = Pricer(
            pricer.plan, pricer.costs, load_model_spec(ModelConfig(preset="tiny")), cluster, trained=TrainedSet(frozen)
        )
        assert np.isfinite(StepSearch(limited, shapes).step_s(first)) == fits


@settings(max_examples=30)
@given(name=st.sampled_from(sorted(PLANS)), seed=st.integers(0, 99), share=st.floats(0.9, 1.02))
def test_what_is_found_fits_into_memory_wherever_the_search_begins(start, name, seed, share):
    _, pricer, shapes, first = start(PLANS[name], seed, num_samples=48)
    limited = with_memory(pricer, share * fullest_bytes(pricer, shapes, first))
    found, found_s = StepSearch(limited, shapes).improve(first, 1000, seed)
    if np.isfinite(found_s):
        assert fullest_bytes(limited, shapes, found) <= limited.memory.limit_bytes
        assert found_s == pytest.approx(limited.step_s(shapes, found), rel=1e-12)


@pytest.mark.parametrize("name", ["disjoint", "interleaved", "colocated", "monolithic"])
def test_a_start_that_takes_too_much_is_brought_within(start, name):
    plan = PLANS[name]
    _, pricer, shapes, packed = start(plan, num_samples=96)
    drawn = np.random.default_rng(0).permutation(96) % plan.num_buckets
    first = pricer.assign(shapes, *np.divmod(drawn, plan.num_microbatches))
    halfway = (fullest_bytes(pricer, shapes, first) + fullest_bytes(pricer, shapes, packed)) / 2
    assert halfway < fullest_bytes(pricer, shapes, first)
    search = StepSearch(with_memory(pricer, halfway), shapes)
    assert search.step_s(first) == np.inf
    found_s = search.improve(first, 4000, seed=0)[1]
    assert found_s < pricer.step_s(shapes, first)


@pytest.mark.parametrize("name", PLANS)
def test_ideal_shares_add_up_and_are_small_where_a_pipeline_fills_and_drains(start, name):
    _, pricer, shapes, _ = start(PLANS[name])
    shares = ideal_shares(pricer, shapes, len(shapes))
    np.testing.assert_allclose(shares.mean(axis=0), 1.0, rtol=1e-6)
    assert (shares >= 0).all()
    apart = ("one stage", "colocated", "bubble-filled", "shared", "encoder shared")
    if PLANS[name].schedule == "1f1b" and name not in apart:
        assert (np.maximum(shares[0], shares[-1]) < shares.max(axis=0)).all()


def test_samples_are_dealt_by_the_shares_that_are_asked_for_in_each_module(start):
    plan = PLANS["disjoint"]
    _, pricer, shapes, _ = start(plan, num_samples=400)
    problem = pricer.problem(shapes)
    share = np.array([[0.6, 0.4], [1.0, 1.2], [1.5, 1.6], [0.9, 0.8]])
    loads_s = bucket_loads(problem, lpt_buckets(problem, share))
    np.testing.assert_allclose(loads_s / loads_s.mean(axis=0), np.tile(share, (plan.grid("llm").dp, 1)), rtol=0.1)


def with_media(shapes):
    return shapes.take(np.flatnonzero(shapes.num_items[:, 0]))


def one_encoder(plan):
    """The plan with one replica of an encoder that has ranks of its own."""
    if plan.placement == "monolithic":
        return plan
    vision, llm = plan.grids
    vision = dataclasses.replace(vision, num_ranks=vision.pp)
    return dataclasses.replace(plan, grids=(vision, dataclasses.replace(llm, rank_offset=vision.num_ranks)))


ONE_ENCODER = {
    name: one_encoder(plan)
    for name, plan in PLANS.items()
    if name not in ("colocated", "bubble-filled", "encoder shared")
}


@pytest.mark.parametrize("name", [name for name in PLANS if "shared" not in name])
@pytest.mark.parametrize(("frozen", "cluster"), [((), CLUSTER), (("vision",), CLUSTER), ((), GPUS)])
def test_a_relaxed_step_with_nothing_to_decide_is_the_step(start, name, frozen, cluster):
    """One replica of each module and one sample a microbatch, all alike: the program is left with the simulation."""
    vision, llm = PLANS[name].grids
    if PLANS[name].placement == "disjoint":
        vision = dataclasses.replace(vision, num_ranks=vision.pp)
        llm = dataclasses.replace(llm, num_ranks=llm.pp, rank_offset=vision.num_ranks)
    else:
        vision, llm = (dataclasses.replace(grid, num_ranks=1, pp=1) for grid in (vision, llm))
    _, pricer, shapes, _ = start(dataclasses.replace(PLANS[name], grids=(vision, llm)), frozen=frozen, cluster=cluster)
    shapes = with_media(shapes).take(np.zeros(4, dtype=np.int64))
    assignment = pricer.assign(shapes, np.zeros(4, dtype=np.int64), np.arange(4))
    assert relaxed_step_s(pricer, shapes) == pytest.approx(pricer.step_s(shapes, assignment), rel=1e-6)


@settings(max_examples=40)
@given(name=st.sampled_from(sorted(ONE_ENCODER)), seed=st.integers(0, 99), cluster=st.sampled_from([CLUSTER, GPUS]))
def test_no_search_ends_below_the_relaxed_step(start, name, seed, cluster):
    _, pricer, shapes, _ = start(ONE_ENCODER[name], seed, num_samples=40, cluster=cluster)
    shapes = with_media(shapes)
    buckets = lpt_buckets(pricer.problem(shapes), ideal_shares(pricer, shapes, len(shapes)))
    first = pricer.assign(shapes, *np.divmod(buckets, ONE_ENCODER[name].num_microbatches))
    _, found_s = StepSearch(pricer, shapes).improve(first, 1000, seed)
    assert relaxed_step_s(pricer, shapes) <= found_s * (1 + 1e-6)


def test_with_many_samples_the_search_ends_near_the_relaxed_step(start):
    plan = dataclasses.replace(make_plan(vision_dp=1, llm_dp=1, llm_pp=4), num_microbatches=16)
    _, pricer, shapes, _ = start(plan, num_samples=300)
    shapes = with_media(shapes)
    buckets = lpt_buckets(pricer.problem(shapes), ideal_shares(pricer, shapes, len(shapes)))
    first = pricer.assign(shapes, *np.divmod(buckets, plan.num_microbatches))
    _, found_s = StepSearch(pricer, shapes).improve(first, 5000, seed=0)
    assert found_s < 1.02 * relaxed_step_s(pricer, shapes)


def test_no_share_asks_for_more_tokens_than_memory_holds(start):
    """Samples that are all alike: shares of time are shares of tokens."""
    plan = dataclasses.replace(make_plan(vision_dp=4, llm_dp=1, llm_pp=4), num_microbatches=16)
    largest = []
    for memory_gib in (64.0, 0.24):
        _, pricer, shapes, _ = start(plan, cluster=dataclasses.replace(CLUSTER, memory_gib=memory_gib))
        alike = shapes.take(np.full(128, shapes.llm_tokens.argmax()))
        largest.append(ideal_shares(pricer, alike, 128)[:, 1].max() * alike.llm_tokens.sum() / 16)
    assert largest[1] <= pricer.memory.max_bucket_tokens() * (1 + 1e-6) < largest[0]


def test_the_search_from_ideal_shares_beats_the_best_equal_buckets(start):
    """Many like samples in a deep pipeline: what equal buckets lose in fill and drain is there to be had."""
    plan = dataclasses.replace(make_plan(vision_dp=8, llm_dp=2, llm_pp=4), num_microbatches=16)
    search, pricer, shapes, first = start(plan, num_samples=256)
    buckets = lpt_buckets(pricer.problem(shapes), ideal_shares(pricer, shapes, len(shapes)))
    shaped = pricer.assign(shapes, *np.divmod(buckets, plan.num_microbatches))
    assert search.step_s(shaped) < 0.97 * search.step_s(first)


@pytest.mark.parametrize(("placement", "share"), [("monolithic", 0.78), ("colocated", 0.92)])
def test_where_replicas_wait_in_every_microbatch_the_slowest_are_relieved(start, placement, share):
    """All replicas end together, so the step says nothing of which to relieve."""
    plan = sharing(make_plan(placement, llm_pp=1, llm_dp=8), "parameters", "parameters")
    search, pricer, shapes, _ = start(plan, num_samples=160)
    first = pricer.assign(shapes, *np.divmod(np.arange(160) % plan.num_buckets, plan.num_microbatches))
    _, found_s = search.improve(first, 400, seed=0)
    assert found_s < share * search.step_s(first)
