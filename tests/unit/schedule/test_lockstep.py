"""Plans whose replicas share parameters: what they hold, what they wait for, and what they need not sync."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.config import ClusterConfig
from dflop.costs import StageKind
from dflop.plan import Grid, Plan
from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import TrainedSet
from dflop.schedule import Pricer, alone_bytes, lasting_s
from dflop.schedule.assignment import deal_media

CLUSTER = ClusterConfig(num_nodes=2, devices_per_node=2, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0)
HYBRID = {"sharding": "hybrid", "shards": 2}
SHARED = {"sharding": "parameters"}
properties = settings(max_examples=40)


def whole_model(vision=SHARED, llm=SHARED, placement="monolithic", num_ranks=4, num_microbatches=3) -> Plan:
    """Every rank has both modules whole, as FSDP has it."""
    return Plan(
        placement=placement,
        grids=(Grid(module="vision", num_ranks=num_ranks, **vision), Grid(module="llm", num_ranks=num_ranks, **llm)),
        num_microbatches=num_microbatches,
    )


@pytest.fixture(scope="module")
def price(costs, tiny_spec):
    def make(plan: Plan, cluster: ClusterConfig = CLUSTER, frozen: tuple[str, ...] = (), **more) -> Pricer:
        return Pricer(plan, costs, tiny_spec, cluster, trained=TrainedSet(frozen), **more)

    return make


def at_random(pricer: Pricer, shapes, seed: int):
    plan = pricer.plan
    bucket = np.random.default_rng(seed).permutation(len(shapes)) % plan.num_buckets
    return pricer.assign(shapes, *np.divmod(bucket, plan.num_microbatches))


@properties
@given(
    seed=st.integers(0, 1000),
    how=st.sampled_from([({}, SHARED), (SHARED, {}), (SHARED, SHARED), (SHARED, HYBRID), (HYBRID, HYBRID)]),
    placement=st.sampled_from(["monolithic", "colocated"]),
    frozen=st.sampled_from([(), ("vision",), ("llm",)]),
)
def test_no_step_beats_the_lower_bound_nor_is_below_that_of_replicas_on_their_own(
    price, draw_samples, seed, how, placement, frozen
):
    """Where moving takes no time; gradients of what is shared are synced as they come."""
    fast = dataclasses.replace(CLUSTER, intra_node_gbps=1e12, inter_node_gbps=1e12)
    shapes = draw_samples(24, seed)
    pricer, apart = (price(whole_model(*own, placement=placement), fast, frozen=frozen) for own in (how, ({}, {})))
    assignment = at_random(pricer, shapes, seed)
    step_s = pricer.step_s(shapes, assignment)
    assert step_s >= apart.step_s(shapes, assignment) * (1 - 1e-6)
    assert step_s >= pricer.lower_bound_s(shapes) * (1 - 1e-9)


def test_every_pass_lasts_as_long_as_on_the_slowest_replica(price, draw_samples):
    pricer, shapes = price(whole_model()), draw_samples(40, 1)
    assignment = at_random(pricer, shapes, 2)
    times = pricer.stage_times(shapes, assignment)
    slowest = np.stack([times.forward_s, times.backward_s]).reshape(2, 2, 4, 3).max(axis=2)
    assert pricer.step_s(shapes, assignment) == pytest.approx(slowest.sum())
    in_nodes = price(whole_model(HYBRID, HYBRID))
    times = in_nodes.stage_times(shapes, assignment)
    of_nodes = np.stack([times.forward_s, times.backward_s]).reshape(2, 2, 2, 2, 3).max(axis=3)
    synced_s = times.sync_s.reshape(2, 4)[:, 0].sum()
    assert in_nodes.step_s(shapes, assignment) == pytest.approx(of_nodes.sum(axis=(0, 1, 3)).max() + synced_s)


def test_an_encoder_that_shares_parameters_waits_where_the_pipeline_behind_it_does_not(price, draw_samples):
    plan = Plan(
        placement="colocated",
        grids=(Grid(module="vision", num_ranks=4, **SHARED), Grid(module="llm", num_ranks=4, pp=2)),
        num_microbatches=3,
    )
    pricer, shapes = price(plan), draw_samples(40, 1)
    timeline = pricer.timeline(pricer.stage_times(shapes, at_random(pricer, shapes, 2)), None)
    ends = timeline.end_s[0]
    assert ends[:4] == pytest.approx(ends[:1].repeat(4, axis=0))
    assert not np.allclose(ends[4], ends[5])


def test_gradients_are_synced_between_copies_alone(price, costs):
    sizes = {
        module: costs.stage_parameter_bytes(StageKind.whole(module, LayoutKey(), 4)) for module in ("vision", "llm")
    }
    sync_s = price(whole_model({}, HYBRID)).sync_s
    inter_s = 1 / (50e9 / 8)
    # Two of the four replicas are in each node, with a card each.
    assert sync_s[:4] == pytest.approx(sizes["vision"] * 2 * 3 / 4 * inter_s / 2)
    assert sync_s[4:] == pytest.approx(sizes["llm"] / 2 * inter_s)
    assert not price(whole_model()).sync_s.any()
    assert not price(whole_model(), frozen=("llm",)).sync_s.any()


def test_sharing_divides_what_is_resident_and_adds_what_is_gathered(price, costs, draw_samples):
    sizes = {
        module: costs.stage_parameter_bytes(StageKind.whole(module, LayoutKey(), 4)) for module in ("vision", "llm")
    }
    both = sum(sizes.values())
    shapes = draw_samples(24, 0)
    resident = {
        name: price(plan).memory.resident_bytes
        for name, plan in {
            "apart": whole_model({}, {}),
            "hybrid": whole_model(HYBRID, HYBRID),
            "shared": whole_model(),
        }.items()
    }
    assert resident["apart"] == pytest.approx(np.full(4, 2.5 * both))
    assert resident["hybrid"] == pytest.approx(np.full(4, 4 / 2 * both))
    assert resident["shared"] == pytest.approx(np.full(4, both))
    shared = price(whole_model())
    assert (alone_bytes(shared, shapes) > shared.costs.held_bytes(resident["shared"][0])).all()


def test_media_are_dealt_anew_in_every_microbatch_where_replicas_meet_in_each(draw_samples):
    shapes = draw_samples(64, 3)
    microbatch = np.arange(64) // 16
    plan = whole_model(SHARED, {}, placement="colocated", num_microbatches=4)
    rank = deal_media(plan, shapes, np.arange(64) % 4, microbatch).encoder_rank[:, 0]
    for turn in range(4):
        own = microbatch == turn
        items = np.bincount(rank[own], weights=shapes.num_items[own, 0], minlength=4)
        assert items.max() - items.min() <= shapes.num_items[own, 0].max()


def test_a_pass_lasts_as_long_as_on_the_slowest_of_those_who_meet():
    plan = whole_model({}, HYBRID, num_microbatches=2)
    seconds = np.arange(16.0).reshape(8, 2)
    lasting = lasting_s(plan, seconds)
    assert (lasting[:4] == seconds[:4]).all()
    assert lasting[4:].tolist() == [[10, 11], [10, 11], [14, 15], [14, 15]]
    assert (lasting_s(whole_model(num_microbatches=2), np.stack([seconds, -seconds]))[1, :4] == [0, -1]).all()
