"""No bound lies above what it bounds: of step times and of memory, for rows, costs and samples that are drawn."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from encoders import costs_of_squares, with_squares
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from spaces import FROZEN, bent_costs, make_config, space_of, uneven_samples

from dflop.balance import LPT, RANDOM
from dflop.plan.trained import TrainedSet
from dflop.search import PlanPricer, plan_of
from dflop.search.encoder_bounds import DealtMedia
from dflop.search.levels import Recomputed, with_recomputed
from dflop.search.link_bounds import LeastLinks
from dflop.search.memory_bounds import LeastMemory
from dflop.search.pipeline_bounds import LlmPipelines
from dflop.search.recompute import JustEnough
from dflop.search.space import llm_layers
from dflop.search.step_bounds import lower_bounds

# Costs are drawn from a seed: a smaller seed is no simpler a case.
_UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
_SLACK = 1 + 1e-9
_NUM_ROWS = 40
_SHAPES = [(2, 1, 6), (4, 1, 8), (4, 2, 8), (6, 2, 9), (8, 2, 10)]
_SHARING = _SHAPES[1], _SHAPES[4]
drawn = given(
    shape=st.sampled_from(_SHAPES),
    seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    freeze=st.sampled_from(FROZEN),
    policy=st.sampled_from([LPT, RANDOM]),
    device_model=st.sampled_from(["cpu", "h100-80g"]),  # what hides no transfers, and what does
    weights=st.sampled_from([1, 100, 1000]),  # from syncs that hardly count to those that no pass can hide
)


class Case:
    """Some rows of a drawn space, with the bounds on them and a pricer for each. In shapes of `_SHARING`, the LLM's
    replicas meet in pairs, as if they shared samples."""

    def __init__(self, spec, shape, seeds, freeze, policy, device_model, weights):
        devices, num_nodes, batch_size = shape
        costs, samples = bent_costs(seeds[0]), uneven_samples(40, seeds[1])
        if seeds[0] % 2:
            costs, samples = costs_of_squares(costs), with_squares(samples, seeds[1])
        sizes = {key: weights * size for key, size in costs.parameter_bytes.items()}
        costs = replace(costs, parameter_bytes=sizes)
        cluster = {"num_nodes": num_nodes, "device_model": device_model}
        config = make_config(devices, batch_size, freeze=freeze, cp_sizes=[1, 2], **cluster)
        batches, splits, rows = space_of(config, spec, costs, samples, 2 if shape in _SHARING else 1)
        self.rows = rows.sample(min(_NUM_ROWS, len(rows)), seed=seeds[1])
        links = LeastLinks(costs, spec, config.cluster, TrainedSet(freeze), 4)
        self.bounds = lower_bounds(self.rows, batches.shapes, costs, spec, splits, links)
        self.pipelines = LlmPipelines(config, spec, costs, batches, splits, links, policy)
        self.media = DealtMedia(spec, costs, batches, policy, TrainedSet(freeze))
        self.memory = LeastMemory(spec, costs, batches, splits, policy, TrainedSet(freeze), 4)
        self.rng, self.spec, self.splits, self.frozen = np.random.default_rng(seeds), spec, splits, freeze
        self.pricer_of = lambda plan: PlanPricer(plan, config, spec, costs, batches, policy)
        self.num_batches = len(batches)

    def __iter__(self):
        """Each row with what its plan recomputes of each of the LLM's stages, drawn, and the pricer."""
        for place, row in enumerate(self.rows.iter_rows(named=True)):
            plan = plan_of(row, self.splits)
            spares_attention = self.pricer_of(plan).spares_attention
            counts = {grid.module: np.zeros(grid.pp, dtype=int) for grid in plan.grids}
            if self.rng.random() < 0.7:
                for grid in plan.grids:
                    layers = plan.layers_of(grid.module, self.spec.module(grid.module).num_layers)
                    most = [sum(map(len, layers[device :: grid.pp])) for device in range(grid.pp)]
                    most = np.array(most) * (1 + (spares_attention and grid.module == "llm"))
                    counts[grid.module] = self.rng.integers(0, most, endpoint=True)
            plan = with_recomputed(plan, counts, self.spec, spares_attention=spares_attention)
            yield place, row, self.of_llm(plan), self.pricer_of(plan)

    def of_llm(self, plan):
        return Recomputed(plan.recomputed_of("llm", self.spec.module("llm").num_layers), plan.attention_kept_of("llm"))

    def ends(self, row):
        """What the LLM needs at least with no layer recomputed, and with all of them."""
        layers = llm_layers(row, self.splits, self.spec.module("llm").num_layers)
        return [self.memory.of_llm(row, own) for own in map(Recomputed.whole, ((0,) * len(layers), layers))]


@settings(max_examples=20, phases=_UNSHRUNK)
@example(  # a stage without trained parameters syncs nothing, and no latency counts
    shape=(4, 1, 8),
    seeds=(853267, 111541),
    freeze=("vision", "llm.embeddings", "llm.layers.[0-1]"),
    policy=LPT,
    device_model="cpu",
    weights=1,
)
@drawn
def test_no_plan_is_faster_than_its_bounds(tiny_spec, shape, seeds, freeze, policy, device_model, weights):
    case = Case(tiny_spec, shape, seeds, freeze, policy, device_model, weights)
    means_s = case.bounds.means()
    for place, row, recomputed, pricer in case:
        steps_s = np.array([pricer.step_s(batch) for batch in range(case.num_batches)])
        assert means_s[place] <= _SLACK * steps_s.mean(), row
        of_mean_batch = case.pipelines.of_batches(row, recomputed, "mean batch")
        assert of_mean_batch[0].item() <= _SLACK * steps_s.mean(), row
        (of_mean_s,) = case.bounds.of_pipeline(place, *of_mean_batch)
        sync_s = case.pipelines.sync_s(row, tuple(llm_layers(row, case.splits, case.spec.module("llm").num_layers)))
        adds_s = case.media.adds_s(row, 0.0, sync_s)
        assert of_mean_s <= _SLACK * steps_s.mean(), row
        of_each_s = case.bounds.of_pipeline(place, *case.pipelines.of_batches(row, recomputed), adds_s=adds_s)
        assert (of_each_s <= _SLACK * steps_s).all(), row
        fullest = case.pipelines.of_batches(row, recomputed, "fullest replica")
        assert (case.bounds.of_fullest(place, *fullest, adds_s=adds_s) <= _SLACK * steps_s).all(), row


@settings(max_examples=20, phases=_UNSHRUNK)
@example(  # two of four stages on two ranks have no backward
    shape=(4, 1, 8),
    seeds=(1849, 1849),
    freeze=("vision", "llm.embeddings", "llm.layers.[0-1]"),
    policy=RANDOM,
    device_model="cpu",
    weights=1000,
)
@drawn
def test_no_plan_needs_less_memory_than_its_bounds(tiny_spec, shape, seeds, freeze, policy, device_model, weights):
    case = Case(tiny_spec, shape, seeds, freeze, policy, device_model, weights)
    for _, row, recomputed, pricer in case:
        needed = max(max(pricer.memory_bytes(batch).values()) for batch in range(case.num_batches))
        of_llm = case.memory.of_llm(row, recomputed)
        assert case.memory.costs.held_bytes(of_llm.max()) <= _SLACK * needed, row
        recomputes = pricer.plan.checkpointing
        assert case.memory.least_bytes(row, of_llm, recomputes=recomputes) <= _SLACK * needed, row


@settings(max_examples=20, phases=_UNSHRUNK)
@drawn
def test_no_plan_that_fits_recomputes_fewer_layers_than_it_must(
    tiny_spec, shape, seeds, freeze, policy, device_model, weights
):
    case = Case(tiny_spec, shape, seeds, freeze, policy, device_model, weights)
    for _, row, recomputed, pricer in case:
        limit = _SLACK * max(max(pricer.memory_bytes(batch).values()) for batch in range(case.num_batches))
        must = case.memory.least_recomputed(row, limit, case.ends(row))
        assert adds_no_more(must, recomputed), row
        nothing = case.pricer_of(plan_of(row, case.splits))
        found = JustEnough(tiny_spec, TrainedSet(freeze), limit).of(nothing) if pricer.plan.checkpointing else None
        if found is not None and nothing.needed_bytes() > limit:
            must = case.memory.least_recomputed(row, limit, case.ends(row), beside_encoders=True)
            assert adds_no_more(must, case.of_llm(found.plan)), row


def adds_no_more(least: Recomputed, own: Recomputed) -> bool:
    """Whether `least` has no more recomputed layers in any stage, and no more of them as a whole."""
    whole = [
        [count - kept for count, kept in zip(each.layers, each.attention_kept, strict=True)] for each in (least, own)
    ]
    pairs = (zip(least.layers, own.layers, strict=True), zip(*whole, strict=True))
    return all(its <= other for each in pairs for its, other in each)


def test_of_equal_texts_the_bound_is_the_step(tiny_spec, costs, samples):
    """Where no replica waits for another or for an encoder, no bound could be higher."""
    nothing = np.zeros(len(samples), dtype=np.int64)
    texts = replace(samples.take(nothing), num_items=nothing[:, None], kept_tokens=nothing[:, None])
    config = make_config(4, 8, fixed={"num_microbatches": 4, "placement": "colocated"}, freeze=["vision"])
    batches, splits, rows = space_of(config, tiny_spec, costs, texts)
    links = LeastLinks(costs, tiny_spec, config.cluster, TrainedSet(("vision",)), 4)
    bounds = lower_bounds(rows, batches.shapes, costs, tiny_spec, splits, links)
    pipelines = LlmPipelines(config, tiny_spec, costs, batches, splits, links, LPT)
    rows = rows.with_row_index("place").filter(pl.col("llm_dp") * 4 <= 8)
    assert rows["schedule"].n_unique() == 3
    for row in rows.iter_rows(named=True):
        step_s = PlanPricer(plan_of(row, splits), config, tiny_spec, costs, batches, LPT).step_s(0)
        nothing = Recomputed.whole((0,) * row["llm_pp"] * row["num_chunks"])
        of_mean = bounds.of_pipeline(row["place"], *pipelines.of_batches(row, nothing))
        of_fullest = bounds.of_fullest(row["place"], *pipelines.of_batches(row, nothing, "fullest replica"))
        assert of_mean[0] == pytest.approx(step_s, rel=1e-9), row
        assert of_fullest[0] == pytest.approx(step_s, rel=1e-9), row
