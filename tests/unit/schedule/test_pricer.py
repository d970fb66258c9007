"""Prices add up: loads go to who computes them, memory bounds hold, and no step beats the lower bound."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import disjoint

from dflop.balance import random_buckets
from dflop.base import UserError, devices
from dflop.config import ClusterConfig
from dflop.costs import CostModel, Link, LinkModel, update_bytes
from dflop.costs.fitted import LoadRange
from dflop.models.loads import Coefficients, Hinge
from dflop.plan import Grid, Plan
from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import TrainedSet
from dflop.schedule import Assignment, Pricer, find_link
from dflop.step import nodes_of

CLUSTER = ClusterConfig(num_nodes=4, devices_per_node=4, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0)


@pytest.fixture(scope="module")
def make_pricer(costs, tiny_spec):
    def make(
        plan: Plan, cluster: ClusterConfig = CLUSTER, model: CostModel = costs, frozen: tuple[str, ...] = (), **more
    ) -> Pricer:
        return Pricer(plan, model, tiny_spec, cluster, trained=TrainedSet(frozen), **more)

    return make


def test_costs_that_say_nothing_of_kept_attention_refuse_a_plan_that_has_it(make_pricer, costs):
    plan = disjoint(llm_pp=2, checkpointing=True)
    llm = dataclasses.replace(plan.grid("llm"), recomputed=(2, 2), attention_kept=(1, 0))
    plan = dataclasses.replace(plan, grids=(plan.grids[0], llm))
    assert make_pricer(plan).plan == plan
    with pytest.raises(UserError, match=r"`grids.llm.attention_kept`, and costs do not .* run `dflop profile-costs`"):
        make_pricer(plan, model=dataclasses.replace(costs, attention_bytes={}))


def at_random(pricer: Pricer, shapes, seed: int) -> Assignment:
    problem = pricer.problem(shapes)
    llm_dp_rank, microbatch = np.divmod(random_buckets(problem, np.random.default_rng(seed)), problem.num_microbatches)
    return pricer.assign(shapes, llm_dp_rank, microbatch)


plans = st.builds(
    disjoint,
    vision_dp=st.integers(1, 3),
    llm_pp=st.integers(1, 4),
    llm_dp=st.integers(1, 3),
    num_microbatches=st.integers(1, 6),
    checkpointing=st.booleans(),
)
properties = settings(max_examples=60)


def test_the_lower_bound_holds_where_one_samples_stage_is_anothers_rest(make_pricer, costs, draw_samples):
    """Long texts weigh on every layer, learned ones on the head: no stage is the slowest for both."""
    times = dict(costs.times)
    for direction in ("forward", "backward"):
        times["llm", LayoutKey(), "layer", False, direction] = Coefficients(0.0, (0, 1e-6, 0, 0))
        times["llm", LayoutKey(), "last", False, direction] = Coefficients(0.0, (0, 0, 0, 1e-4))
    model = dataclasses.replace(costs, times=times)
    shapes = draw_samples(40, 0)
    long = np.arange(40) % 2 == 0
    nothing = np.zeros(40, dtype=np.int64)
    shapes = dataclasses.replace(
        shapes,
        num_items=nothing[:, None],
        kept_tokens=nothing[:, None],
        llm_tokens=np.where(long, 2000, 20),
        target_tokens=np.where(long, 1, 19),
    )
    pricer = make_pricer(disjoint(llm_pp=3, num_microbatches=20), model=model)
    microbatch = np.arange(40) // 2
    assignment = pricer.assign(shapes, np.zeros(40, dtype=np.int64), microbatch)
    assert pricer.lower_bound_s(shapes) <= pricer.step_s(shapes, assignment)


@pytest.mark.parametrize("share_with_media", [1.0, 0.5])
def test_the_lower_bound_counts_work_of_which_the_first_items_take_no_time(
    make_pricer, costs, draw_samples, share_with_media
):
    """Kernels of few items wait for their launch, so that more of them take as long; samples are all alike, but some
    have no media."""
    times = {key: Coefficients(0.0, (0, 0, 0, 0)) for key in costs.times}
    for direction in ("forward", "backward"):
        times["vision", LayoutKey(), "layer", False, direction] = Coefficients(0.01, (0,) * 4, (Hinge(0, 2.0, 0.1),))
    shapes = draw_samples(16, 0)
    has_media = np.arange(16) % 4 < share_with_media * 4  # those of a microbatch have all, or none
    shapes = dataclasses.replace(shapes, num_items=4 * has_media[:, None].astype(np.int64), sum_sq_items=None)
    grids = Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=2)
    plan = Plan(placement="monolithic", grids=grids, num_microbatches=4)
    pricer = make_pricer(plan, model=dataclasses.replace(costs, times=times), frozen=("llm",))
    assignment = pricer.assign(shapes, np.arange(16) // 4 % 2, np.arange(16) % 4)
    computed_s = pricer.stage_times(shapes, assignment)
    work_s = (computed_s.forward_s + computed_s.backward_s).sum(axis=1).max()
    bound_s = pricer.lower_bound_s(shapes)
    assert bound_s <= pricer.step_s(shapes, assignment)
    assert bound_s == pytest.approx(work_s) if share_with_media == 1 else 0 < bound_s <= work_s


@properties
@given(plan=plans, seed=st.integers(0, 1000))
def test_bridges_carry_the_visual_tokens_from_their_encoder_to_their_replica(make_pricer, draw_samples, plan, seed):
    """One message for every pair of replicas and microbatch with tokens, none for the others."""
    pricer, shapes = make_pricer(plan), draw_samples(24, seed)
    assignment = at_random(pricer, shapes, seed)
    nodes, bridges = nodes_of(plan), pricer.stage_times(shapes, assignment).bridges
    expected = {}
    for source, target in itertools.product(range(len(nodes)), repeat=2):
        if (nodes[source].module, nodes[target].module, nodes[target].pp_stage) != ("vision", "llm", 0):
            continue
        for microbatch in range(plan.num_microbatches):
            chosen = (assignment.microbatch == microbatch) & (assignment.llm_dp_rank == nodes[target].dp_rank)
            tokens = int(shapes.kept_tokens[chosen & (assignment.encoder_rank[:, 0] == nodes[source].dp_rank)].sum())
            if tokens:
                expected[source, target, microbatch] = tokens * 128 * 4 / (gbps_between(source, target) * 1e9 / 8)
    keys = list(zip(*(a.tolist() for a in (bridges.source, bridges.target, bridges.microbatch)), strict=True))
    assert len(set(keys)) == len(keys)
    assert dict(zip(keys, bridges.seconds.tolist(), strict=True)) == pytest.approx(expected)


@properties
@given(plan=plans, seed=st.integers(0, 1000))
def test_hidden_states_go_from_stage_to_stage_within_a_replica(make_pricer, draw_samples, plan, seed):
    pricer, shapes = make_pricer(plan), draw_samples(24, seed)
    assignment = at_random(pricer, shapes, seed)
    chain_s = pricer.stage_times(shapes, assignment).chain_s
    for index, node in enumerate(nodes_of(plan)):
        is_last = node.module == "vision" or node.pp_stage == plan.grid("llm").pp - 1
        for microbatch in range(plan.num_microbatches):
            chosen = (assignment.microbatch == microbatch) & (assignment.llm_dp_rank == node.dp_rank)
            tokens = 0 if is_last else int(shapes.llm_tokens[chosen].sum())
            gbps = gbps_between(index, index + plan.grid("llm").dp)
            assert chain_s[index, microbatch] == pytest.approx(tokens * 128 * 4 / (gbps * 1e9 / 8))


def gbps_between(rank: int, other: int) -> float:
    """Nodes of disjoint plans at tp 1 are numbered as their ranks."""
    return CLUSTER.intra_node_gbps if rank // 4 == other // 4 else CLUSTER.inter_node_gbps


def with_links(costs: CostModel, **fitted: Link) -> CostModel:
    """`p2p_intra_2=Link(…)`"""
    keys = {name: name.rsplit("_", 2) for name in fitted}
    links = {(kind, scope, int(num_ranks)): fitted[name] for name, (kind, scope, num_ranks) in keys.items()}
    return dataclasses.replace(costs, links=LinkModel(links))


def test_transfers_are_priced_by_the_links_that_were_measured_and_else_by_the_configured_bandwidth(
    make_pricer, draw_samples, costs
):
    """Ranks 0 to 3 are of the first node: the encoder's and those of three of the LLM's four stages."""
    pricer = make_pricer(disjoint(llm_pp=4), model=with_links(costs, p2p_intra_2=Link(3e-4, 2e9)))
    shapes = draw_samples(24, 0)
    assignment = at_random(pricer, shapes, 0)
    times = pricer.stage_times(shapes, assignment)
    llm_bytes = np.bincount(assignment.microbatch, weights=shapes.llm_tokens, minlength=4) * 128 * 4
    vision_bytes = np.bincount(assignment.microbatch, weights=shapes.kept_tokens[:, 0], minlength=4) * 128 * 4
    np.testing.assert_allclose(times.bridges.seconds, 3e-4 + vision_bytes[times.bridges.microbatch] / 2e9)
    assert sorted(times.bridges.microbatch) == np.flatnonzero(vision_bytes).tolist()
    _, first, second, third, last = times.chain_s
    np.testing.assert_allclose(first, 3e-4 + llm_bytes / 2e9)
    np.testing.assert_allclose(second, 3e-4 + llm_bytes / 2e9)
    np.testing.assert_allclose(third, llm_bytes / (CLUSTER.inter_node_gbps * 1e9 / 8))
    assert (last == 0).all()


@pytest.mark.parametrize(
    ("vision_dp", "fitted", "expected"),
    [
        (1, {"gradient_sync_intra_3": Link(1e-3, 1e9)}, lambda size: 1e-3 + size / 1e9),
        (1, {"gradient_sync_intra_2": Link(1e-3, 1e9)}, lambda size: 2e-3 + size / 1e9 * 4 / 3),
        (2, {"gradient_sync_inter_3": Link(5e-3, 1e8)}, lambda size: 5e-3 + size / 1e8),
        (1, {"gradient_sync_inter_3": Link(5e-3, 1e8)}, lambda size: 4 / 3 * size / (100e9 / 8)),
        (2, {"gradient_sync_intra_3": Link(1e-3, 1e9)}, lambda size: 4 / 3 * size / (50e9 / 8)),
    ],
    ids=["as measured", "from two ranks", "over nodes", "not measured inside a node", "not measured over nodes"],
)
def test_gradients_are_summed_over_the_replicas_links(make_pricer, draw_samples, costs, vision_dp, fitted, expected):
    """Three LLM replicas: behind one encoder rank they fill the first node, behind two they reach the second."""
    pricer = make_pricer(disjoint(vision_dp=vision_dp, llm_dp=3), model=with_links(costs, **fitted))
    shapes = draw_samples(24, 0)
    sync_s = pricer.stage_times(shapes, at_random(pricer, shapes, 0)).sync_s
    size = 4 * 5e5 + 3e5
    llm = [index for index, node in enumerate(pricer.nodes) if node.module == "llm"]
    assert sync_s[llm] == pytest.approx(expected(size))


@pytest.mark.parametrize(
    ("per_node", "tp", "sharing", "intra_gbps", "num_ranks", "gbps"),
    [
        (4, 1, {}, 1000.0, 8, 200.0),  # four replicas in each node: four cards
        (2, 1, {}, 1000.0, 8, 100.0),
        (1, 1, {}, 1000.0, 8, 50.0),
        (4, 2, {}, 1000.0, 4, 100.0),  # the other two cards are those of the other tp ranks' sync
        (4, 4, {}, 1000.0, 2, 50.0),
        (3, 1, {}, 1000.0, 8, 100.0),  # nodes of 3, 3 and 2
        (4, 1, {}, 120.0, 8, 120.0),  # not faster than the node's own links
        (4, 1, {"sharding": "hybrid", "shards": 4}, 1000.0, 2, 50.0 * 4),  # a quarter of the bytes over one card each
    ],
)
def test_a_sync_between_nodes_has_the_cards_of_all_its_ranks_in_a_node(
    costs, tiny_spec, draw_samples, per_node, tp, sharing, intra_gbps, num_ranks, gbps
):
    """Eight ranks hold an LLM; a ring moves `2 (n - 1) / n` of the bytes over each rank's links."""
    cluster = dataclasses.replace(CLUSTER, devices_per_node=per_node, intra_node_gbps=intra_gbps)
    grids = Grid(module="vision", num_ranks=8, tp=tp), Grid(module="llm", num_ranks=8, tp=tp, **sharing)
    plan = Plan(placement="monolithic", grids=grids, num_microbatches=2)
    pricer = Pricer(plan, costs, tiny_spec, dataclasses.replace(cluster, num_nodes=-(-8 // per_node)))
    stage = next(stage for stage in pricer.stages if stage.module == "llm")
    assert pricer.transfers.gradient_sync_s(stage, 1e9) == pytest.approx(
        2 * (num_ranks - 1) / num_ranks * 1e9 / (gbps * 1e9 / 8)
    )


@pytest.mark.parametrize("sharding", [{}, {"sharding": "parameters"}])
def test_the_optimisers_step_on_a_ranks_share_takes_its_time(costs, tiny_spec, draw_samples, sharding):
    grids = Grid(module="vision", num_ranks=8), Grid(module="llm", num_ranks=8, **sharding)
    plan, shapes = Plan(placement="monolithic", grids=grids, num_microbatches=2), draw_samples(24, 0)
    slow = dataclasses.replace(costs, update_bytes_per_s=1e6)
    for frozen in ((), ("llm",)):
        without, with_update = (
            Pricer(plan, model, tiny_spec, CLUSTER, trained=TrainedSet(frozen)) for model in (costs, slow)
        )
        of_nodes = with_update.sync_s - without.sync_s
        for stage, node in zip(without.stages, (0, 8), strict=True):
            trained_bytes, _ = costs.trained_and_frozen_bytes(without.stage_costs.kind(stage))
            assert (trained_bytes == 0) == (stage.module in frozen)
            how = {"value_bytes": 4, "num_shards": 8 if sharding and stage.module == "llm" else 1}
            assert of_nodes[node : node + 8] == pytest.approx(update_bytes(trained_bytes, 8, **how) / 1e6)
        times = [pricer.stage_times(shapes, at_random(pricer, shapes, 0)) for pricer in (without, with_update)]
        steps_s = [pricer.timeline(of, None).step_s for pricer, of in zip((without, with_update), times, strict=True)]
        assert steps_s[1] - steps_s[0] == pytest.approx(of_nodes[0] + of_nodes[8])  # a rank has a node of each


def test_a_sync_of_gpus_has_the_steps_of_its_two_rings(costs, tmp_path):
    """14 microseconds from node to node, inside a node what the data sheet says."""
    sheet = tmp_path / "mine.yaml"
    known = yaml.safe_load(Path(devices.__file__).with_name("devices.yaml").read_text())
    sheet.write_text(yaml.safe_dump({"mine": known["h100-80g"] | {"hop_s": 5.7e-6}}))
    gpus = dataclasses.replace(CLUSTER, device="cuda", device_model="h100-80g")
    own = dataclasses.replace(gpus, device_model="mine", device_models=str(sheet))

    def latency_s(cluster, *where) -> float:
        return find_link(costs.links, cluster, "gradient_sync", *where).latency_s

    assert latency_s(CLUSTER, False, 8, 4) == 0
    assert latency_s(gpus, True, 4) == pytest.approx(2 * 3 * 3.4e-6)
    assert latency_s(gpus, False, 8, 4) == pytest.approx(2 * (6 * 3.4e-6 + 14e-6))
    assert latency_s(gpus, False, 3, 1) == pytest.approx(2 * 2 * 14e-6)
    assert latency_s(own, False, 8, 4) == pytest.approx(2 * (6 * 5.7e-6 + 14e-6))
    assert find_link(costs.links, gpus, "p2p", False).latency_s == 0


def test_parameters_gathered_between_nodes_come_over_the_cards_of_all_their_ranks(costs, tiny_spec):
    grids = Grid(module="vision", num_ranks=8), Grid(module="llm", num_ranks=8, sharding="parameters")
    plan = Plan(placement="monolithic", grids=grids, num_microbatches=2)
    cluster = dataclasses.replace(CLUSTER, intra_node_gbps=1000.0)
    link = Pricer(plan, costs, tiny_spec, cluster).transfers.sharing_link("llm")
    assert link.bytes_per_s == pytest.approx(4 * 50e9 / 8 * 8 / 14)


@pytest.mark.parametrize(("precision", "summed"), [("fp32", 4 / 8), ("bf16", 4 / 6)])
def test_syncs_run_beside_passes_where_devices_compute_while_they_communicate(
    make_pricer, draw_samples, costs, precision, summed
):
    """Gradients of all but the first layer and the embedding; parameters of layers, but for the first one."""
    plan, shapes = disjoint(vision_dp=2, llm_dp=2, llm_pp=2), draw_samples(24, 0)
    pricers = [
        make_pricer(plan, precision=precision, cluster=dataclasses.replace(CLUSTER, device_model=device_model))
        for device_model in ("cpu", "h100-80g")
    ]
    assignment = at_random(pricers[0], shapes, 0)
    on_cpus, on_gpus = (pricer.stage_times(shapes, assignment) for pricer in pricers)
    assert (on_cpus.early_sync_s, on_cpus.late_sync_s) == (None, None)
    early, late = [], []
    for node in pricers[1].nodes:
        layer, first, last = (
            costs.parameter_bytes[node.module, LayoutKey(), part] for part in ("layer", "first", "last")
        )
        num_layers, is_first = (4, True) if node.module == "vision" else (2, node.pp_stage == 0)
        whole = num_layers * layer + first * is_first + last * (node.module == "vision" or not is_first)
        early.append(summed * (1 - (layer + first * is_first) / whole))
        late.append((1 - summed) * (num_layers - 1) * layer / whole)
    np.testing.assert_allclose(on_gpus.early_sync_s, on_gpus.sync_s * early)
    np.testing.assert_allclose(on_gpus.late_sync_s, on_gpus.sync_s * late)
    assert pricers[1].step_s(shapes, assignment) < pricers[0].step_s(shapes, assignment)


@properties
@given(plan=plans, seed=st.integers(0, 1000))
def test_more_bytes_never_cross_faster_and_a_latency_makes_no_step_shorter(
    make_pricer, draw_samples, costs, plan, seed
):
    slow = with_links(costs, p2p_intra_2=Link(1e-3, 1e9), p2p_inter_2=Link(2e-3, 5e8), all_reduce_intra_2=Link(1, 1e9))
    pricer, shapes = make_pricer(plan, model=slow), draw_samples(24, seed)
    assignment = at_random(pricer, shapes, seed)
    more = dataclasses.replace(shapes, llm_tokens=shapes.llm_tokens * 2, kept_tokens=shapes.kept_tokens * 2)
    less, more = (pricer.stage_times(batch, assignment) for batch in (shapes, more))
    assert (more.bridges.source == less.bridges.source).all()
    assert (more.bridges.seconds > less.bridges.seconds).all()
    assert (more.chain_s[less.chain_s > 1e-3] > less.chain_s[less.chain_s > 1e-3]).all()
    assert pricer.step_s(shapes, assignment) >= make_pricer(plan).step_s(shapes, assignment)


def test_half_precision_halves_what_crosses_a_bridge(make_pricer, draw_samples):
    shapes = draw_samples(16, 0)
    full, half = (make_pricer(disjoint(), precision=precision) for precision in ("fp32", "bf16"))
    assignment = at_random(full, shapes, 0)
    whole_s, half_s = (pricer.stage_times(shapes, assignment).bridges.seconds for pricer in (full, half))
    assert len(whole_s)
    np.testing.assert_allclose(half_s, whole_s / 2)


def test_a_frozen_encoder_takes_no_backward_time_and_balances_by_its_forward_alone(make_pricer, draw_samples):
    shapes = draw_samples(16, 0)
    trained, frozen = make_pricer(disjoint(vision_dp=2)), make_pricer(disjoint(vision_dp=2), frozen=("vision",))
    assignment = at_random(trained, shapes, 0)
    times, times_frozen = trained.stage_times(shapes, assignment), frozen.stage_times(shapes, assignment)
    assert (times_frozen.backward_s[:2] == 0).all()
    np.testing.assert_array_equal(times_frozen.forward_s, times.forward_s)
    assert times.sync_s[0] > 0
    assert times_frozen.sync_s[0] == 0
    loads, loads_frozen = trained.problem(shapes).loads_s, frozen.problem(shapes).loads_s
    np.testing.assert_allclose(loads_frozen[:, 0], loads[:, 0] / 3)  # backward takes twice the forward here
    np.testing.assert_allclose(loads_frozen[:, 1], loads[:, 1])


@properties
@given(seed=st.integers(0, 1000), llm_pp=st.integers(1, 3), checkpointing=st.booleans(), room=st.floats(1.05, 3.0))
def test_a_batch_whose_buckets_keep_their_token_limit_fits_in_memory(
    make_pricer, draw_samples, seed, llm_pp, checkpointing, room
):
    """Where all samples have as large a share of learned tokens as the batch."""
    shapes = draw_samples(24, seed)
    shapes = dataclasses.replace(shapes, target_tokens=np.maximum(1, shapes.llm_tokens // 5))
    plan = disjoint(llm_pp=llm_pp, num_microbatches=4, checkpointing=checkpointing)
    roomy = make_pricer(plan)
    assignment = at_random(roomy, shapes, seed)
    needed = roomy.memory_bytes(shapes, assignment)["llm"]
    tight = dataclasses.replace(CLUSTER, memory_gib=needed * room / 2**30)
    pricer = make_pricer(plan, tight)
    limit = pricer.memory.max_bucket_tokens(target_share=float(shapes.target_tokens.sum() / shapes.llm_tokens.sum()))
    tokens = np.bincount(assignment.microbatch, weights=shapes.llm_tokens)
    assert limit < roomy.memory.max_bucket_tokens()
    is_even = shapes.llm_tokens.max() <= limit and shapes.llm_tokens.sum() <= 4 * limit
    assert pricer.problem(shapes).max_bucket_tokens == (limit if is_even else None)
    fullest = dataclasses.replace(shapes, llm_tokens=shapes.llm_tokens * limit // int(tokens.max()))
    fullest = dataclasses.replace(fullest, target_tokens=fullest.llm_tokens // 5)
    assert pricer.memory_bytes(fullest, assignment)["llm"] <= tight.memory_gib * 2**30


@properties
@given(plan=plans, seed=st.integers(0, 1000))
def test_more_tokens_or_items_take_more_memory(make_pricer, draw_samples, plan, seed):
    pricer, shapes = make_pricer(plan), draw_samples(24, seed)
    assignment = at_random(pricer, shapes, seed)
    small = pricer.memory_bytes(shapes, assignment)
    more = dataclasses.replace(shapes, llm_tokens=shapes.llm_tokens * 2, num_items=shapes.num_items * 2)
    large = pricer.memory_bytes(more, assignment)
    assert large["llm"] > small["llm"]
    assert large["vision"] >= small["vision"]


def test_stages_ahead_hold_more_microbatches_in_memory(make_pricer, draw_samples):
    """The encoder of a deeper pipeline has more microbatches in flight."""
    shapes = draw_samples(24, 0)
    peaks = []
    for llm_pp in (1, 2, 4):
        pricer = make_pricer(disjoint(llm_pp=llm_pp, num_microbatches=6))
        assignment = Assignment(
            llm_dp_rank=np.zeros(24, dtype=np.int64),
            microbatch=np.arange(24) % 6,
            encoder_rank=np.zeros((24, 1), dtype=int),
        )
        peaks.append(pricer.memory_bytes(shapes, assignment)["vision"])
    assert peaks == sorted(set(peaks))


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_a_frozen_module_holds_its_parameters_alone(make_pricer, draw_samples, module):
    shapes = draw_samples(16, 0)
    trained, frozen = make_pricer(disjoint()), make_pricer(disjoint(), frozen=(module,))
    assignment = at_random(trained, shapes, 0)
    saved = trained.memory_bytes(shapes, assignment)[module] - frozen.memory_bytes(shapes, assignment)[module]
    assert saved >= 3 * (4 * 5e5 + 3e5) * (1 - 1e-9)  # gradients and two moments of four layers and the rest


def test_parameters_that_do_not_fit_say_so_with_both_numbers(make_pricer):
    with pytest.raises(
        UserError, match=r"optimiser state of vision take 0.* GiB a device and .* 0 GiB, `cluster\.memory_gib` is 1e-06"
    ):
        make_pricer(disjoint(), dataclasses.replace(CLUSTER, memory_gib=1e-6)).memory.max_bucket_tokens()


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_what_processes_and_their_allocators_hold_comes_on_top(make_pricer, costs, draw_samples, module):
    shapes = draw_samples(24, 0)
    plain = make_pricer(disjoint())
    assignment = at_random(plain, shapes, 0)
    held = make_pricer(disjoint(), model=dataclasses.replace(costs, overhead_bytes=1e8, allocator_share=0.5))
    tensors = plain.memory_bytes(shapes, assignment)[module]
    assert held.memory_bytes(shapes, assignment)[module] == pytest.approx(1e8 + 1.5 * tensors)
    assert held.memory.max_bucket_tokens() < plain.memory.max_bucket_tokens()


def test_the_share_of_microbatches_beyond_what_was_measured_is_counted(make_pricer, costs, draw_samples):
    shapes = draw_samples(24, 0)
    assignment = at_random(make_pricer(disjoint()), shapes, 0)
    nothing, anything = (0.0,) * 4, (1e12,) * 4
    for most, share in ((anything, 0.0), (nothing, 0.5)):
        ranges = {
            ("llm", LayoutKey(), False): LoadRange(nothing, most),
            ("vision", LayoutKey(), False): LoadRange(nothing, anything),
        }
        pricer = make_pricer(disjoint(), model=dataclasses.replace(costs, ranges=ranges))
        assert pricer.extrapolated_share(shapes, assignment) == share
        marked = pricer.extrapolated(shapes, assignment)
        nodes = pricer.nodes
        assert marked.shape == (len(nodes), pricer.plan.num_microbatches)
        for node, of_node in zip(nodes, marked, strict=True):
            assert of_node.all() == of_node.any() == (node.module == "llm" and share > 0)
