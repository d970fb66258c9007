"""A plan recomputes just as many layers as its devices' memory asks for."""

import dataclasses

import numpy as np
import pytest
from encoders import spec_with
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from spaces import bent_costs, make_config, some_needs, space_of, uneven_samples

from dflop.balance import LPT
from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS, Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.search import GroupedBatches, PlanPricer, plan_of
from dflop.search.levels import with_recomputed
from dflop.search.recompute import JustEnough

# Costs are drawn from a seed: a smaller seed is no simpler a case.
_UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
_NUM_ROWS = 10


def most_of(
    plan: Plan, spec: ModelSpec, freeze: tuple[str, ...], *, spares_attention: bool = False
) -> dict[str, np.ndarray]:
    """Of each module the layers that each of its devices along the pipeline can recompute, each twice of an LLM with
    `spares_attention`."""
    most = {}
    for grid in plan.grids:
        layers = plan.layers_of(grid.module, spec.module(grid.module).num_layers)
        on_devices = [sum(map(len, layers[device :: grid.pp])) for device in range(grid.pp)]
        most[grid.module] = np.array(on_devices) * (
            grid.module not in {name.removesuffix(".encoder") for name in freeze} or grid.module == "llm"
        )
    return most | {"llm": most["llm"] * (1 + spares_attention)}


def fewest_by_trying(
    nothing: PlanPricer, batches: GroupedBatches, spec: ModelSpec, freeze: tuple[str, ...], limit: float
) -> dict[str, list[int]]:
    """One level after the other, for each device while all others recompute everything."""
    plan, how = nothing.plan, {"spares_attention": nothing.spares_attention}
    most = most_of(plan, spec, freeze, **how)

    def needed(counts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        pricer = nothing.recomputing(with_recomputed(plan, counts, spec, **how))
        return pricer.bytes_along_pipeline(range(len(batches)))

    found, free = {}, list(most)
    if PLACEMENTS[plan.placement].shares_ranks:
        encoders, free = [module for module in most if module != "llm"], ["llm"]
        num_levels = max([1, *(most[module].max() for module in encoders)])
        for level in range(num_levels + 1 if encoders else 0):
            counts = {module: np.ceil(level * most[module] / num_levels).astype(int) for module in encoders}
            counts["llm"] = 0 * most["llm"]
            if max(own.max() for own in needed(counts).values()) <= limit:
                return {module: own.tolist() for module, own in counts.items()}
        found = {module: most[module].tolist() for module in encoders}
    for module in free:
        found[module] = []
        for device, end in enumerate(most[module]):
            for count in range(end + 1):
                counts = {name: own.copy() for name, own in most.items()}
                counts[module][device] = count
                if needed(counts)[module][device] <= limit:
                    break
            found[module].append(count)
    return found


@pytest.mark.parametrize("encoders", [("vision",), (), ("vision", "audio")], ids=len)
@settings(max_examples=5, phases=_UNSHRUNK)
@example(shape=(4, 2, 5), seeds=(233, 99615), freeze=("vision",), share=0.0)  # attention of a sample alone
@given(
    shape=st.sampled_from([(2, 1, 6), (4, 1, 8), (4, 2, 5)]),
    seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    freeze=st.sampled_from([(), ("vision",), ("llm",), ("vision.encoder",)]),
    share=st.floats(0.0, 1.0),
)
def test_no_device_could_do_with_fewer_layers(tiny_spec, encoders, shape, seeds, freeze, share):
    spec = spec_with(tiny_spec, encoders)
    freeze = tuple(name for name in freeze if name.removesuffix(".encoder") in (*encoders, "llm"))
    assume(set(freeze) != {*encoders, "llm"})  # which leaves nothing to train
    devices, num_nodes, batch_size = shape
    config = make_config(devices, batch_size, num_nodes=num_nodes, freeze=freeze, search_batches=2)
    costs = bent_costs(seeds[0], modules=(*encoders, "llm"))
    samples = uneven_samples(40, seeds[1], encoders)
    limit = np.quantile(some_needs(config, spec, costs, samples), share)
    config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, memory_gib=limit / 2**30))
    batches, splits, rows = space_of(config, spec, costs, samples)
    for row in rows.sample(min(_NUM_ROWS, len(rows)), seed=seeds[1]).iter_rows(named=True):
        nothing = PlanPricer(plan_of(row, splits), config, spec, costs, batches, LPT)
        how = {"spares_attention": nothing.spares_attention}
        everything = nothing.recomputing(with_recomputed(nothing.plan, most_of(nothing.plan, spec, freeze), spec))
        enough = JustEnough(spec, TrainedSet(freeze), limit).of(nothing)
        if enough is None:
            assert everything.needed_bytes() > limit
            continue
        assert enough.needed_bytes() <= limit
        fewest = as_arrays(fewest_by_trying(nothing, batches, spec, freeze, limit))
        fewest = with_recomputed(nothing.plan, fewest, spec, **how)
        if nothing.recomputing(fewest).alone_bytes() <= limit:
            assert enough.plan == fewest
        else:  # a single sample asks for more
            assert recomputed_by(enough.plan, spec) > recomputed_by(fewest, spec)
        assert enough.step_s(0) >= nothing.step_s(0) * (1 - 1e-9) or row["placement"] == "bubble_filled"


def test_a_plan_that_fits_with_one_layer_less_of_the_llm_alone_is_found(tiny_spec):
    found = 0
    for seed in range(8):
        config, costs, samples = make_config(4, 8, search_batches=2), bent_costs(seed), uneven_samples(40, seed)
        batches, splits, rows = space_of(config, tiny_spec, costs, samples)
        for row in rows.filter(rows["placement"] == "colocated").sample(6, seed=seed).iter_rows(named=True):
            nothing = PlanPricer(plan_of(row, splits), config, tiny_spec, costs, batches, LPT)
            most = most_of(nothing.plan, tiny_spec, ())
            but_one = {name: np.maximum(count - 1, 0) for name, count in most.items()}
            limit, *others = (
                nothing.recomputing(with_recomputed(nothing.plan, counts, tiny_spec)).needed_bytes()
                for counts in (most | {"llm": but_one["llm"]}, most, but_one)
            )
            enough = JustEnough(tiny_spec, TrainedSet(()), limit).of(nothing)
            assert enough is not None
            assert enough.needed_bytes() <= limit
            found += limit < min(others)
    assert found


@pytest.mark.parametrize(("text_tokens", "is_spared"), [(4000, True), (400, False)])
def test_attention_is_spared_where_samples_are_long(tiny_spec, costs, text_tokens, is_spared):
    """It is half as long as the rest of a layer's forward at 2,500 tokens, and keeps a quarter of what a layer does."""
    samples = uneven_samples(40, 0)
    samples = dataclasses.replace(samples, kept_tokens=0 * samples.kept_tokens, num_items=0 * samples.num_items)
    samples = dataclasses.replace(samples, llm_tokens=np.full(40, text_tokens), target_tokens=np.full(40, 100))
    config = make_config(2, 8, placements=["colocated"], shardings=["optimizer"], cp_sizes=(1,))
    batches, splits, rows = space_of(config, tiny_spec, costs, samples)
    whole_alone = dataclasses.replace(costs, attention_bytes={})
    num_spared, gains_s = 0, []
    for row in rows.iter_rows(named=True):
        pricers = [
            PlanPricer(plan_of(row, splits), config, tiny_spec, own, batches, LPT) for own in (costs, whole_alone)
        ]
        assert [pricer.spares_attention for pricer in pricers] == [is_spared, False]
        most = with_recomputed(pricers[0].plan, most_of(pricers[0].plan, tiny_spec, ()), tiny_spec)
        limit = (pricers[0].needed_bytes() + pricers[0].recomputing(most).needed_bytes()) / 2
        ours, wholes = (JustEnough(tiny_spec, TrainedSet(()), limit).of(pricer) for pricer in pricers)
        assert ours.needed_bytes() <= limit
        # Of four layers, one recomputed as a whole may free just enough where two but for attention free more.
        assert ours.step_s(0) <= 1.02 * wholes.step_s(0)
        gains_s.append(wholes.step_s(0) - ours.step_s(0))
        num_spared += any(ours.plan.attention_kept_of("llm"))
        assert not any(wholes.plan.attention_kept_of("llm"))
    assert (num_spared > 0) == (np.mean(gains_s) > 0) == is_spared


def as_arrays(counts: dict[str, list[int]]) -> dict[str, np.ndarray]:
    return {module: np.array(own) for module, own in counts.items()}


def recomputed_by(plan: Plan, spec: ModelSpec) -> int:
    """Recomputed layers; those recomputed as a whole count twice."""
    layers = sum(sum(plan.recomputed_of(own.name, own.num_layers)) for own in spec.modules)
    return 2 * layers - sum(sum(plan.attention_kept_of(own.name)) for own in spec.modules)


def test_the_chunks_of_a_device_take_turns_in_recomputing(tiny_spec):
    grids = (Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=2, pp=2, rank_offset=1))
    plan = Plan(placement="disjoint", grids=grids, num_microbatches=2, schedule="interleaved_1f1b", num_chunks=2)
    counts = {"vision": np.array([0]), "llm": np.array([1, 2])}
    some = with_recomputed(plan, counts, tiny_spec)
    assert some.grid("llm").recomputed == (1, 1, 0, 1)
    assert some.grid("vision").recomputed == (0,)
    assert with_recomputed(plan, {"vision": np.array([0]), "llm": np.array([0, 0])}, tiny_spec) == plan
    everything = with_recomputed(plan, {"vision": np.array([4]), "llm": np.array([2, 2])}, tiny_spec)
    assert everything == dataclasses.replace(plan, checkpointing=True)
