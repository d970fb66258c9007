"""Corrections: bins' ratios are found through noise, outliers pass by, and every price follows them alike."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.balance import lpt_buckets, random_buckets
from dflop.config import ClusterConfig
from dflop.costs import Loads
from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.schedule import Corrections, Learner, Pricer, StepSearch, bin_of, is_stale, stale_share
from dflop.schedule.correction import NUM_LOAD_BINS, NUM_SEGMENT_BINS, bins_of

CLUSTER = ClusterConfig(devices_per_node=4, memory_gib=64.0, intra_node_gbps=100.0, inter_node_gbps=50.0)


def make_plan(placement="disjoint", *, vision_dp=2, llm_dp=2, llm_pp=2, num_microbatches=4, schedule="1f1b") -> Plan:
    num_ranks = llm_dp * llm_pp
    encoders = {"disjoint": vision_dp, "colocated": num_ranks, "monolithic": llm_dp}[placement]
    return Plan(
        placement=placement,
        grids=(
            Grid(module="vision", num_ranks=encoders),
            Grid(module="llm", num_ranks=num_ranks, pp=llm_pp, rank_offset=encoders if placement == "disjoint" else 0),
        ),
        num_microbatches=num_microbatches,
        schedule=schedule,
    )


PLANS = {
    "disjoint": make_plan(),
    "colocated": make_plan("colocated"),
    "monolithic": make_plan("monolithic"),
}


def drawn_corrections(seed: int) -> Corrections:
    """A factor of its own, between a half and two, for every bin."""
    rng = np.random.default_rng(seed)
    shape = (2, NUM_LOAD_BINS, NUM_SEGMENT_BINS)
    return Corrections(version=1, factors={name: 2.0 ** rng.uniform(-1, 1, shape) for name in ("vision", "llm")})


def llm_loads(tokens, segment=64.0) -> Loads:
    tokens = np.atleast_1d(np.asarray(tokens, dtype=float))
    nothing = np.zeros_like(tokens)
    return Loads(nothing, tokens, tokens * segment, nothing)


def learned_from(ratios, loads: Loads) -> Learner:
    """A learner that saw the LLM's microbatches take `ratios` times their tables' second, one entry a step."""
    learner = Learner()
    table_s = np.ones((2, *loads.num_items.shape))
    for ratio in ratios:
        learner.observe([("llm", loads, table_s, table_s * ratio)])
    return learner


loads_drawn = st.tuples(*[st.integers(0, 2**20).map(float)] * 4)


@given(loads=loads_drawn)
def test_the_kernel_puts_a_microbatch_into_the_bin_that_arrays_do(loads):
    array = Loads(*(np.array([load]) for load in loads))
    expected = tuple(int(place[0]) for place in bins_of(array))
    assert bin_of(np.array(loads)) == expected


@given(load=st.integers(1, 2**20))
def test_a_bin_is_an_octave_of_the_main_load(load):
    (load_bin,), (segment_bin,) = bins_of(llm_loads(load, segment=64.0))
    assert 2.0 ** (load_bin - 1) <= load < 2.0**load_bin
    assert segment_bin == 7


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(PLANS)), seed=st.integers(0, 999), frozen=st.sampled_from([(), ("vision",)]))
def test_the_search_prices_corrected_steps_as_the_pricer_does_and_no_step_beats_the_bound(
    costs, tiny_spec, draw_samples, name, seed, frozen
):
    plan, shapes = PLANS[name], draw_samples(24, seed)
    pricer = Pricer(plan, costs, tiny_spec, CLUSTER, trained=TrainedSet(frozen)).corrected(drawn_corrections(seed))
    problem = pricer.problem(shapes)
    buckets = random_buckets(problem, np.random.default_rng(seed))
    first = pricer.assign(shapes, *np.divmod(buckets, plan.num_microbatches))
    search = StepSearch(pricer, shapes)
    assert search.step_s(first) == pytest.approx(pricer.step_s(shapes, first), rel=1e-12)
    found, found_s = search.improve(first, 200, seed)
    assert found_s == pytest.approx(pricer.step_s(shapes, found), rel=1e-12)
    assert pricer.lower_bound_s(shapes) <= found_s * (1 + 1e-9)


@settings(max_examples=20)
@given(name=st.sampled_from(sorted(PLANS)), seed=st.integers(0, 999))
def test_each_microbatch_takes_its_bins_factor_times_what_the_table_says(costs, tiny_spec, draw_samples, name, seed):
    """The oracle looks bins up one node and microbatch at a time."""
    plan, shapes = PLANS[name], draw_samples(24, seed)
    table = Pricer(plan, costs, tiny_spec, CLUSTER)
    corrections = drawn_corrections(seed)
    assignment = table.assign(shapes, *np.divmod(lpt_buckets(table.problem(shapes)), plan.num_microbatches))
    before, after = (pricer.stage_times(shapes, assignment) for pricer in (table, table.corrected(corrections)))
    loads = table.loads(shapes, assignment)
    for index, node in enumerate(table.nodes):
        for microbatch in range(plan.num_microbatches):
            own = [float(load[node.dp_rank, microbatch]) for load in loads[node.module]]
            main = own[1] if node.module == "llm" else own[0]
            segment = own[2] / main if node.module == "llm" and main else 0.0
            place = (len(f"{int(main):b}") if main else 0, len(f"{int(segment):b}") if segment else 0)
            for way, name_s in enumerate(("forward_s", "backward_s")):
                factor = corrections.factors[node.module][way][place]
                expected = factor * getattr(before, name_s)[index, microbatch]
                assert getattr(after, name_s)[index, microbatch] == pytest.approx(expected, rel=1e-12)


def test_without_corrections_every_price_is_the_tables(costs, tiny_spec, draw_samples):
    shapes, table = draw_samples(24, 0), Pricer(PLANS["disjoint"], costs, tiny_spec, CLUSTER)
    other = table.corrected(drawn_corrections(0)).corrected()
    np.testing.assert_array_equal(other.problem(shapes).loads_s, table.problem(shapes).loads_s)
    assert other.lower_bound_s(shapes) == table.lower_bound_s(shapes)


@given(ratio=st.floats(0.3, 3.0), noise=st.floats(0, 0.05), seed=st.integers(0, 999))
def test_a_bins_ratio_is_found_through_noise(ratio, noise, seed):
    rng = np.random.default_rng(seed)
    loads = llm_loads([1000.0] * 4)
    learner = learned_from([ratio * np.exp(rng.normal(0, noise, (2, 4))) for _ in range(20)], loads)
    factors = learner.learned.at("llm", loads)
    np.testing.assert_allclose(factors, ratio, rtol=0.03 + 2 * noise)


@given(outlier=st.floats(0.01, 100.0), when=st.integers(0, 9))
def test_one_odd_step_changes_nothing(outlier, when):
    loads = llm_loads([1000.0, 1000.0])
    ratios = [1.3] * 10
    ratios[when] = outlier
    learner = learned_from(ratios, loads)
    np.testing.assert_allclose(learner.learned.at("llm", loads), 1.3)


def test_what_often_takes_long_counts():
    """Every third step takes thrice as long: a step time feels the mean, 1.67, and no median would."""
    loads = llm_loads([1000.0, 1000.0])
    learner = learned_from([1.0, 1.0, 3.0] * 20, loads)
    assert learner.learned.at("llm", loads).min() > 1.3


def test_a_ratio_that_changes_is_followed():
    loads = llm_loads([1000.0, 1000.0])
    learner = learned_from([1.0] * 10 + [1.3] * 15, loads)
    np.testing.assert_allclose(learner.learned.at("llm", loads), 1.3, rtol=0.02)


def test_a_bin_met_a_few_times_is_left_as_it_is():
    assert learned_from([2.0] * 4, llm_loads([1000.0] * 50)).learned.factors == {}
    assert learned_from([2.0] * 5, llm_loads([1000.0])).learned.factors == {}
    assert learned_from([2.0] * 6, llm_loads([1000.0])).learned.factors != {}


def test_ratios_near_one_correct_nothing():
    assert learned_from([1.02] * 20, llm_loads([1000.0])).learned.factors == {}


def test_a_bin_never_met_is_taken_to_be_as_far_off_as_the_others():
    everywhere = learned_from([1.3] * 6, llm_loads([100.0, 500.0, 1000.0])).learned
    np.testing.assert_allclose(everywhere.at("llm", llm_loads([5000.0])), 1.3)
    one = learned_from([np.array([1.0, 1.3, 1.0])] * 6, llm_loads([100.0, 500.0, 1000.0])).learned
    np.testing.assert_allclose(one.at("llm", llm_loads([500.0])), 1.3)
    np.testing.assert_allclose(one.at("llm", llm_loads([5000.0])), 1.3 ** (1 / 3))


@settings(max_examples=20)
@given(seed=st.integers(0, 999), sigma=st.floats(0.3, 0.8))
def test_what_noise_alone_tells_of_bins_is_hardly_believed(seed, sigma):
    """Bins that are alike but for noise: the factors are several times nearer to one another than the averages."""
    rng, loads = np.random.default_rng(seed), llm_loads(2.0 ** np.arange(3, 15))
    learner = learned_from([np.exp(rng.normal(0, sigma, (2, 12))) for _ in range(40)], loads)
    averages = np.array([learned.log_ratio for learned in learner.bins.values()])
    assert np.std(np.log(learner.learned.at("llm", loads))) < 0.5 * np.std(averages)


@pytest.mark.parametrize("odd", [np.nan, np.inf, 0.0])
def test_times_that_are_none_are_left_out(odd):
    loads = llm_loads([1000.0, 1000.0])
    learner = learned_from([np.array([1.3, odd])] * 6, loads)
    np.testing.assert_allclose(learner.learned.at("llm", loads), 1.3)
    assert {learned.num_cells for learned in learner.bins.values()} == {6}


def test_factors_are_used_once_they_predict_a_step_better_than_the_table():
    loads, ratios = llm_loads([100.0, 1000.0]), np.array([1.0, 1.3])
    assert not learned_from([ratios] * 6, loads).corrections.factors  # learned, but held against no step yet
    used = learned_from([ratios] * 7, loads)
    assert used.corrections.factors
    assert used.corrections.version == 7
    assert Learner.from_dict(json.loads(json.dumps(used.to_dict()))).corrections.factors


def test_what_all_times_have_in_common_is_learned_and_not_used():
    loads = llm_loads([100.0, 1000.0])
    learner = learned_from([1.3] * 12, loads)
    np.testing.assert_allclose(learner.learned.at("llm", loads), 1.3)
    assert not learner.corrections.factors


def test_factors_that_hold_no_longer_are_used_no_longer():
    """A machine that was slow at large microbatches, and then at small ones: what was learned predicts the opposite."""
    loads = llm_loads([100.0, 1000.0])
    before, after = np.array([1.0, 1.3]), np.array([1.3, 1.0])
    assert learned_from([before] * 10, loads).corrections.factors
    assert not learned_from([before] * 10 + [after] * 3, loads).corrections.factors
    assert learned_from([before] * 10 + [after] * 40, loads).corrections.factors


def test_what_was_learned_comes_back_from_json_and_goes_on_as_if_never_gone():
    loads = llm_loads([100.0, 1000.0])
    learner = learned_from([1.3, 1.5, 0.7, 1.2], loads)
    again = Learner.from_dict(json.loads(json.dumps(learner.to_dict())))
    for one in (learner, again):
        one.observe([("llm", loads, np.ones((2, 2)), np.full((2, 2), 1.1))])
    assert again.bins == learner.bins
    assert again.learned.version == learner.learned.version == 5


def test_a_table_is_stale_when_most_bins_are_off_by_more_than_a_fifth():
    loads = llm_loads([100.0, 500.0, 1000.0])
    most, few = (learned_from([np.array(ratios)] * 6, loads) for ratios in ([1.3, 0.7, 1.0], [1.3, 1.0, 1.1]))
    assert is_stale(most.bins)
    assert stale_share(few.bins) == pytest.approx(1 / 3)
    assert not is_stale(few.bins)
    assert not is_stale({})
