"""Plans that share ranks, split layers unevenly or follow another schedule are priced by the same rules."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import make_plan

from dflop.balance import random_buckets
from dflop.base import UserError
from dflop.config import ClusterConfig
from dflop.costs import CostModel, LinkModel
from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.schedule import Assignment, Pricer
from dflop.schedule.transfers import Transfers
from dflop.step import nodes_of, workers_of
from dflop.step.routes import edges_of, lanes_of, make_routes

CLUSTER = ClusterConfig(num_nodes=4, devices_per_node=4, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0)
properties = settings(max_examples=60)


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)]
any_plans = st.builds(
    lambda placement, schedule, dp: make_plan(placement, schedule[0], dp=dp, num_chunks=schedule[1]),
    st.sampled_from(["disjoint", "colocated", "bubble_filled", "monolithic"]),
    st.sampled_from(SCHEDULES),
    st.integers(1, 3),
)


@pytest.fixture(scope="module")
def make_pricer(costs, tiny_spec):
    def make(
        plan: Plan, cluster: ClusterConfig = CLUSTER, model: CostModel = costs, frozen: tuple[str, ...] = (), **more
    ) -> Pricer:
        return Pricer(plan, model, tiny_spec, cluster, trained=TrainedSet(frozen), **more)

    return make


def at_random(pricer: Pricer, shapes, seed: int) -> Assignment:
    problem = pricer.problem(shapes)
    llm_dp_rank, microbatch = np.divmod(random_buckets(problem, np.random.default_rng(seed)), problem.num_microbatches)
    return pricer.assign(shapes, llm_dp_rank, microbatch)


@properties
@given(plan=any_plans, frozen=st.sampled_from([(), ("vision",), ("llm",)]), seed=st.integers(0, 1000))
def test_no_step_beats_the_lower_bound(make_pricer, draw_samples, plan, frozen, seed):
    pricer, shapes = make_pricer(plan, frozen=frozen), draw_samples(24, seed)
    assert pricer.lower_bound_s(shapes) <= pricer.step_s(shapes, at_random(pricer, shapes, seed)) * (1 + 1e-9)


@properties
@given(plan=any_plans, seed=st.integers(0, 1000))
def test_all_plans_of_a_batch_do_the_same_work(make_pricer, draw_samples, costs, plan, seed):
    """Without what a stage costs whatever it is given, every layer computes every item and token exactly once."""
    free = dataclasses.replace(
        costs, times={key: dataclasses.replace(fit, const=0.0) for key, fit in costs.times.items()}
    )
    shapes = draw_samples(24, seed)
    work_s = []
    for any_plan in (plan, make_plan("monolithic", pp=1)):
        pricer = make_pricer(any_plan, model=free)
        times = pricer.stage_times(shapes, at_random(pricer, shapes, seed))
        is_llm = np.array([node.module == "llm" for node in nodes_of(any_plan)])
        both_s = (times.forward_s + times.backward_s).sum(axis=1)
        work_s.append([both_s[is_llm].sum(), both_s[~is_llm].sum()])
    np.testing.assert_allclose(*work_s)


@properties
@given(
    seed=st.integers(0, 1000),
    dp=st.integers(1, 2),
    pp=st.integers(1, 4),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    frozen=st.sampled_from([(), ("vision",)]),
    room=st.floats(0.0, 1.0),
)
def test_filling_bubbles_is_never_slower_than_the_colocated_order_and_stays_within_the_same_memory(
    make_pricer, draw_samples, seed, dp, pp, schedule, frozen, room
):
    """Memory lies between what any order holds at least and what the colocated one holds, and above."""
    shapes = draw_samples(24, seed)
    both = [make_pricer(make_plan(name, schedule, pp, dp), frozen=frozen) for name in ("colocated", "bubble_filled")]
    assignment = at_random(both[0], shapes, seed)
    steps, needs = ([getattr(own, name)(shapes, own.filled(shapes, assignment)) for own in both]
                    for name in ("step_s", "memory_bytes"))  # fmt: skip
    assert steps[1] <= steps[0] * (1 + 1e-12)
    most = max(needs[0].values())
    tight = dataclasses.replace(CLUSTER, memory_gib=most * (0.7 + 0.4 * room) / 2**30)
    pricer = make_pricer(both[1].plan, tight, frozen=frozen)
    held = max(pricer.memory_bytes(shapes, pricer.filled(shapes, assignment)).values())
    assert held <= tight.memory_gib * 2**30 or held <= most * (1 + 1e-12)


@properties
@given(seed=st.integers(0, 1000), dp=st.integers(1, 2))
def test_features_for_the_llm_on_the_same_ranks_need_no_transfer(make_pricer, draw_samples, seed, dp):
    plan = make_plan("colocated", dp=dp)
    pricer, shapes = make_pricer(plan), draw_samples(24, seed)
    bridges = pricer.stage_times(shapes, at_random(pricer, shapes, seed)).bridges
    together = {pair for worker in workers_of(plan) for pair in itertools.permutations(worker.nodes, 2)}
    for source, target, seconds in zip(bridges.source, bridges.target, bridges.seconds, strict=True):
        assert (seconds == 0) == ((int(source), int(target)) in together)


MIXED_TP = [("disjoint", 1, 1), ("disjoint", 2, 2), ("disjoint", 1, 2), ("disjoint", 4, 2)]
MIXED_TP += [("colocated", vision_tp, llm_tp) for vision_tp in (1, 2, 4) for llm_tp in (1, 2, 4)]


@pytest.mark.parametrize(("placement", "vision_tp", "llm_tp"), MIXED_TP)
def test_a_message_takes_as_long_as_the_copies_that_a_rank_sends_of_it(placement, vision_tp, llm_tp):
    """The mean of both ways, counted from the routes that messages take in training."""
    vision = Grid(module="vision", num_ranks=4, tp=vision_tp)
    llm = Grid(module="llm", num_ranks=4, tp=llm_tp, rank_offset=4 * (placement == "disjoint"))
    plan = Plan(placement=placement, grids=(vision, llm), num_microbatches=1)
    workers, edges = workers_of(plan), edges_of(plan)
    routes = make_routes(workers, edges)
    cluster = ClusterConfig(devices_per_node=8, memory_gib=1.0, intra_node_gbps=8.0, inter_node_gbps=8.0)
    copy_s = 1e6 / 1e9
    for edge, (source, target) in zip(edges, itertools.product(range(vision.dp), range(llm.dp)), strict=True):
        bridges = Transfers(plan, LinkModel({}), cluster).bridges(
            np.array([[source]]), np.array([target]), np.array([0]), np.array([[1e6]])
        )
        num_sent = Counter(
            (way, route.sender, here)
            for way, of_edges in enumerate((routes.forward, routes.backward))
            for route in of_edges[edges.index(edge)]
            for here, _ in lanes_of(workers[route.sender].num_ranks, workers[route.receiver].num_ranks)
        )
        most = [max((count for key, count in num_sent.items() if key[0] == way), default=0) for way in (0, 1)]
        assert bridges.seconds.tolist() == pytest.approx([copy_s * sum(most) / 2])


def test_stages_take_as_long_as_their_layers(make_pricer, draw_samples):
    shapes = draw_samples(24, 0)
    pricer = make_pricer(make_plan(layers=(3, 1)))
    assignment = at_random(pricer, shapes, 0)
    even_s = make_pricer(make_plan()).stage_times(shapes, assignment).forward_s[2:]
    uneven_s = pricer.stage_times(shapes, assignment).forward_s[2:]
    layer_s = 1e-4 + 5e-6 * np.bincount(assignment.microbatch, weights=shapes.llm_tokens)
    layer_s += 1e-9 * np.bincount(assignment.microbatch, weights=shapes.llm_tokens.astype(float) ** 2)
    np.testing.assert_allclose(uneven_s - even_s, [layer_s, -layer_s])
    with pytest.raises(UserError, match=r"layers \[3, 2\] are 5 together, the model has 4"):
        make_pricer(make_plan(layers=(3, 2)))


def test_a_chunk_is_a_stage_with_its_share_of_the_layers_and_a_rank_holds_all_of_its_chunks(make_pricer, draw_samples):
    shapes = draw_samples(24, 0)
    chunked, plain = (
        make_pricer(make_plan(schedule=name, num_chunks=v)) for name, v in (("interleaved_1f1b", 2), ("1f1b", 1))
    )
    assignment = at_random(plain, shapes, 0)
    assert chunked.stage_times(shapes, assignment).forward_s.shape == (6, 4)
    # More microbatches of half the layers are in flight: Narayanan et al. 2021 count 1 + (p - 1) / (p v) as much.
    assert chunked.memory_bytes(shapes, assignment)["llm"] > plain.memory_bytes(shapes, assignment)["llm"]


def test_memory_follows_the_schedule_and_what_shares_a_rank(make_pricer, draw_samples):
    shapes = draw_samples(64, 0)
    peaks = {}
    for placement, schedule in (
        ("disjoint", "1f1b"),
        ("disjoint", "gpipe"),
        ("colocated", "1f1b"),
    ):
        pricer = make_pricer(make_plan(placement, schedule, num_microbatches=16))
        microbatch = np.arange(64) % 16
        peaks[placement, schedule] = pricer.memory_bytes(shapes, pricer.assign(shapes, 0 * microbatch, microbatch))
    assert peaks["disjoint", "1f1b"]["llm"] < peaks["disjoint", "gpipe"]["llm"]
    assert peaks["colocated", "1f1b"]["llm"] > peaks["disjoint", "1f1b"]["llm"] + 4 * 4 * 5e5  # the encoder's layers
    assert peaks["colocated", "1f1b"]["llm"] == peaks["colocated", "1f1b"]["vision"]


@properties
@given(
    placement=st.sampled_from(["colocated", "monolithic"]),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 1000),
    room=st.floats(1.05, 3.0),
)
def test_buckets_of_even_media_that_keep_their_token_limit_fit_beside_the_encoder(
    make_pricer, draw_samples, placement, schedule, seed, room
):
    """Where every microbatch has as many items a token, and at most a quarter of the tokens is learned."""
    plan = make_plan(placement, schedule[0], pp=2, num_chunks=schedule[1])
    tokens = np.full(8, 400 + seed)
    shapes = dataclasses.replace(
        draw_samples(8, seed),
        num_items=np.full((8, 1), 6),
        llm_tokens=tokens,
        kept_tokens=tokens[:, None] // 2,
        target_tokens=tokens // 5,
    )
    roomy = make_pricer(plan)
    microbatch = np.arange(8) // 2
    assignment = roomy.assign(shapes, 0 * microbatch, microbatch)
    needed = roomy.memory_bytes(shapes, assignment)["llm"]
    tight = make_pricer(plan, dataclasses.replace(CLUSTER, memory_gib=needed * room / 2**30))
    limit = tight.memory.max_bucket_tokens({"vision": 6 / tokens[0]})
    assert limit <= roomy.memory.max_bucket_tokens({"vision": 6 / tokens[0]}) <= roomy.memory.max_bucket_tokens()
    fullest = dataclasses.replace(
        shapes,
        num_items=(6 * np.full(8, limit // 2) // tokens)[:, None],
        llm_tokens=np.full(8, limit // 2),
        kept_tokens=np.full((8, 1), limit // 4),
        target_tokens=np.full(8, limit // 10),
    )
    held = tight.memory_bytes(fullest, assignment)["llm"]
    assert 0.8 * needed < held <= tight.memory.limit_bytes
