"""Models with no encoder and with several are priced by the rules that hold for one, and held against slow oracles."""

import itertools

import numpy as np
import pytest
from encoders import ENCODERS, costs_with, plan_with, samples_with, spec_with
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflop.balance import random_buckets
from dflop.config import ClusterConfig
from dflop.costs import Loads, StageKind
from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import TrainedSet
from dflop.schedule import Assignment, Pricer, alone_bytes, fits, fitted
from dflop.step import nodes_of

CLUSTER = ClusterConfig(num_nodes=3, devices_per_node=4, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0)
properties = settings(max_examples=40)
plans = st.builds(
    plan_with,
    st.sampled_from(ENCODERS),
    st.sampled_from(["disjoint", "colocated", "monolithic"]),
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(1, 3),
)
frozen_sets = st.sampled_from([(), ("vision",), ("llm",)])


@pytest.fixture(scope="module")
def case(costs, tiny_spec, draw_samples):
    """`case(plan, seed, frozen=(), num_samples=24)`: the plan's pricer, drawn samples and a drawn assignment."""

    def make(plan, seed: int, frozen=(), num_samples: int = 24):
        encoders = [grid.module for grid in plan.grids[:-1]]
        pricer = Pricer(
            plan, costs_with(costs, encoders), spec_with(tiny_spec, encoders), CLUSTER, trained=TrainedSet(frozen)
        )
        shapes = samples_with(draw_samples, encoders, num_samples, seed)
        buckets = np.arange(num_samples) % plan.num_buckets
        if num_samples >= plan.num_buckets:
            buckets = random_buckets(pricer.problem(shapes), np.random.default_rng(seed))
        return pricer, shapes, pricer.assign(shapes, *np.divmod(buckets, plan.num_microbatches))

    return make


def computes(plan, shapes, assignment, node, sample: int) -> bool:
    if node.module == "llm":
        return assignment.llm_dp_rank[sample] == node.dp_rank
    return assignment.encoder_rank[sample, shapes.encoders.index(node.module)] == node.dp_rank


@properties
@given(plan=plans, frozen=frozen_sets, seed=st.integers(0, 1000))
def test_every_stage_is_charged_for_the_samples_it_computes_and_no_other(case, plan, frozen, seed):
    assume({grid.module for grid in plan.grids} - set(frozen))
    pricer, shapes, assignment = case(plan, seed, frozen)
    times = pricer.stage_times(shapes, assignment)
    for index, node in enumerate(nodes_of(plan)):
        is_llm, pp = node.module == "llm", plan.grid(node.module).pp
        kind = StageKind(
            module=node.module,
            layout=LayoutKey(),
            num_layers=4 // pp,
            is_first=node.pp_stage == 0,
            is_last=node.pp_stage == pp - 1,
        )
        for microbatch in range(plan.num_microbatches):
            loads = np.zeros(4)
            for sample in np.flatnonzero(assignment.microbatch == microbatch):
                if computes(plan, shapes, assignment, node, sample):
                    tokens = shapes.llm_tokens[sample]
                    items = 0 if is_llm else shapes.items_of(node.module)[sample]
                    loads += [0, tokens, tokens**2, shapes.target_tokens[sample]] if is_llm else [items, 0, 0, 0]
            forward_s, backward_s = pricer.costs.stage_time(kind, Loads(*loads[:, None]))
            assert times.forward_s[index, microbatch] == pytest.approx(forward_s.item())
            has_backward = is_llm or node.module not in frozen
            assert times.backward_s[index, microbatch] == pytest.approx(backward_s.item() * has_backward)


@properties
@given(plan=plans, seed=st.integers(0, 1000))
def test_features_cross_from_each_encoder_to_the_replicas_that_learn_them(case, plan, seed):
    pricer, shapes, assignment = case(plan, seed)
    bridges, nodes = pricer.stage_times(shapes, assignment).bridges, nodes_of(plan)
    expected = set()
    for (index, node), (other, target) in itertools.product(enumerate(nodes), repeat=2):
        if node.module == "llm" or (target.module, target.pp_stage) != ("llm", 0) or plan.placement == "monolithic":
            continue
        for sample in np.flatnonzero(shapes.kept_by(node.module)):
            if computes(plan, shapes, assignment, node, sample) and computes(plan, shapes, assignment, target, sample):
                expected.add((index, other, int(assignment.microbatch[sample])))
    keys = list(zip(*(a.tolist() for a in (bridges.source, bridges.target, bridges.microbatch)), strict=True))
    assert len(keys) == len(set(keys))
    assert set(keys) == expected


@properties
@given(plan=plans, frozen=frozen_sets, seed=st.integers(0, 1000))
def test_no_step_beats_the_lower_bound(case, plan, frozen, seed):
    pricer, shapes, assignment = case(plan, seed, frozen)
    assert pricer.lower_bound_s(shapes) <= pricer.step_s(shapes, assignment) * (1 + 1e-9)
    num_encoders = len(shapes.encoders)
    num_loads = 1 + (min(1, num_encoders) if plan.placement == "monolithic" else num_encoders)
    assert pricer.problem(shapes).loads_s.shape == (len(shapes), num_loads)


@properties
@given(plan=plans, frozen=frozen_sets, seed=st.integers(0, 1000))
def test_a_sample_alone_takes_what_a_batch_of_it_does_wherever_that_takes_least(case, plan, frozen, seed):
    """The oracle prices a batch of one sample for all replicas that may compute it."""
    pricer, shapes, _ = case(plan, seed, frozen, num_samples=4)
    choices = [[0] if plan.placement == "monolithic" else range(grid.dp) for grid in plan.grids[:-1]]
    for index, own_bytes in enumerate(alone_bytes(pricer, shapes)):
        one, needs = shapes.take(np.array([index])), []
        for ranks in itertools.product(*choices):
            assignment = Assignment(
                llm_dp_rank=np.array([0]),
                microbatch=np.array([plan.num_microbatches - 1]),
                encoder_rank=np.array([ranks], dtype=np.int64),
            )
            needs.append(max(pricer.memory_bytes(one, assignment).values()))
        assert own_bytes == pytest.approx(min(needs), rel=1e-9)


@properties
@given(plan=plans, seed=st.integers(0, 1000))
def test_each_encoders_replicas_share_its_items_evenly(case, plan, seed):
    _, shapes, assignment = case(plan, seed)
    for column, encoder in enumerate(shapes.encoders):
        items, ranks = shapes.items_of(encoder), assignment.encoder_rank[:, column]
        if plan.placement == "monolithic":
            np.testing.assert_array_equal(ranks, assignment.llm_dp_rank)
            continue
        for microbatch in range(plan.num_microbatches):
            is_own = assignment.microbatch == microbatch
            if plan.placement == "colocated":
                is_own = assignment.microbatch <= microbatch
            loads = np.bincount(ranks[is_own], weights=items[is_own], minlength=plan.grid(encoder).dp)
            assert loads.max() - loads.min() <= items[is_own].max(initial=0)


@properties
@given(plan=plans, seed=st.integers(0, 1000))
def test_a_batch_is_made_to_fit_where_small_changes_do_it(case, plan, seed):
    pricer, shapes, assignment = case(plan, seed)
    made = fitted(pricer, shapes, [assignment], np.random.default_rng(seed))
    assert fits(pricer, shapes, made)
    assert made.encoder_rank.shape == (len(shapes), len(shapes.encoders))
