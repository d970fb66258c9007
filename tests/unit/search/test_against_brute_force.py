"""The search finds what pricing every plan of the space on every batch finds, although it prices few of them."""

import numpy as np
import polars as pl
import pytest
from encoders import spec_with
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from spaces import FROZEN, bent_costs, make_config, price_all, some_needs, uneven_samples, with_memory

from dflop.balance import LPT, RANDOM
from dflop.base import UserError
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.search import search_plans
from dflop.shapes import SampleShapes

# Costs are drawn from a seed: a smaller seed is no simpler a case.
_UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
_SHAPES = [(2, 1, 6), (3, 1, 7), (4, 1, 8), (4, 2, 5), (6, 2, 6)]


def check_against_all(config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, policy=LPT) -> None:
    """The search's ten best are the ten best of all plans that fit, the fastest is its best."""
    everything = price_all(config, spec, costs, samples, policy)
    fitting = everything.filter(pl.col("memory_bytes") <= config.cluster.memory_gib * 2**30).sort("step_s")
    if fitting.is_empty():
        with pytest.raises(UserError, match=r"no plan fits into `cluster\.memory_gib`"):
            search_plans(config, spec, costs, samples, policy=policy)
        return
    found = search_plans(config, spec, costs, samples, policy=policy)
    assert found.num_plans == len(everything)
    ten = [own.step_s for own in found.candidates[:10]]
    np.testing.assert_allclose(ten, fitting["step_s"][:10], rtol=1e-9)
    known = dict(fitting.select("plan", "step_s").iter_rows())
    np.testing.assert_allclose(ten, [known[str(own.plan)] for own in found.candidates[:10]], rtol=1e-9)
    assert found.best is found.candidates[0]
    assert found.candidates[0].step_s <= found.least_bound_s * (1 + 1e-9)


@settings(max_examples=2, phases=_UNSHRUNK)
@given(
    shape=st.sampled_from(_SHAPES),
    seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    freeze=st.sampled_from(FROZEN),
    policy=st.sampled_from([LPT, RANDOM]),
    memory_share=st.sampled_from([0.0, 0.02, 0.2, 0.6, 1.0]),
)
def test_the_ten_best_are_those_of_all_plans(tiny_spec, shape, seeds, freeze, policy, memory_share):
    """Memory is such that about `memory_share` of the plans fit."""
    devices, num_nodes, batch_size = shape
    config = make_config(devices, batch_size, num_nodes=num_nodes, freeze=freeze)
    costs, samples = bent_costs(seeds[0]), uneven_samples(40, seeds[1])
    needs = some_needs(config, tiny_spec, costs, samples, policy)
    limit = np.quantile(needs, memory_share) * (1 if memory_share else 0.99)
    check_against_all(with_memory(config, limit / 2**30), tiny_spec, costs, samples, policy)


@pytest.mark.parametrize(
    "encoders",
    [
        pytest.param((), id="0"),
        pytest.param(("vision", "audio"), id="2"),
        pytest.param(("vision", "audio", "depth"), id="3", marks=pytest.mark.exhaustive),  # it takes longest
    ],
)
@settings(max_examples=1, phases=_UNSHRUNK)
@given(
    shape=st.sampled_from([(4, 1, 7), (4, 2, 5)]),
    seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    freeze=st.sampled_from([(), ("vision",)]),
    memory_share=st.sampled_from([0.2, 1.0]),
)
# Without encoders, the ninth best takes exactly the memory that there is, and its bound is more by a rounding.
@example(shape=(4, 1, 7), seeds=(1534, 89), freeze=(), memory_share=0.2)
def test_the_best_plans_of_models_without_encoder_and_with_several(
    tiny_spec, shape, seeds, freeze, memory_share, encoders
):
    devices, num_nodes, batch_size = shape
    fixed = {"num_microbatches": 2} if len(encoders) > 1 else None  # so many layouts take a minute as it is
    config = make_config(devices, batch_size, num_nodes=num_nodes, freeze=freeze, search_batches=2, fixed=fixed)
    spec = spec_with(tiny_spec, encoders)
    costs = bent_costs(seeds[0], modules=(*encoders, "llm"))
    samples = uneven_samples(40, seeds[1], encoders)
    limit = np.quantile(some_needs(config, spec, costs, samples), memory_share)
    check_against_all(with_memory(config, limit / 2**30), spec, costs, samples)


@pytest.mark.parametrize(
    "fixed",
    [
        {"placement": "colocated", "llm": {"pp": 2}},
        {"schedule": "gpipe", "vision": {"tp": 2}},
        {"num_microbatches": 5, "checkpointing": False},
        {"placement": "disjoint", "vision": {"pp": 2, "dp": 1}},
    ],
)
def test_pins_leave_the_best_of_the_rest(tiny_spec, fixed):
    config = make_config(6, 8, fixed=fixed)
    costs, samples = bent_costs(3), uneven_samples(40, 4)
    limit = np.quantile(some_needs(config, tiny_spec, costs, samples), 0.5)
    check_against_all(with_memory(config, limit / 2**30), tiny_spec, costs, samples)


@pytest.mark.exhaustive
@pytest.mark.parametrize("memory_share", [0.05, 1.0])
def test_sixteen_devices_on_two_nodes(tiny_spec, costs, samples, memory_share):
    """With the hand-made costs, which know tp 1 alone."""
    config = make_config(16, 16, num_nodes=2, search_batches=2)
    limit = np.quantile(some_needs(config, tiny_spec, costs, samples), memory_share)
    config = with_memory(config, limit / 2**30)
    check_against_all(config, tiny_spec, costs, samples)
    found = search_plans(config, tiny_spec, costs, samples)
    assert found.num_priced < 0.1 * found.num_plans
    if memory_share < 1:
        assert any(own.plan.checkpointing for own in found.candidates[:10])


@pytest.mark.parametrize(
    ("devices", "num_nodes", "batch_size", "seed", "freeze", "memory_share"),
    [
        pytest.param(4, 1, 8, 1, (), 1.0, marks=pytest.mark.exhaustive),
        (4, 2, 5, 2, ("vision",), 0.4),
        pytest.param(4, 1, 7, 3, (), 0.2, marks=pytest.mark.exhaustive),
    ],
)
def test_bubble_filled_plans_beside_colocated_ones(
    tiny_spec, devices, num_nodes, batch_size, seed, freeze, memory_share
):
    placements = ["colocated", "bubble_filled"]
    config = make_config(
        devices, batch_size, num_nodes=num_nodes, freeze=freeze, placements=placements, search_batches=2
    )
    costs, samples = bent_costs(seed), uneven_samples(40, seed)
    limit = np.quantile(some_needs(config, tiny_spec, costs, samples), memory_share)
    check_against_all(with_memory(config, limit / 2**30), tiny_spec, costs, samples)
