"""No bound lies above what it bounds: of step times and of memory, for rows, costs and samples that are drawn."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from encoders import costs_of_squares, with_squares
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from spaces import bent_costs, make_config, space_of, uneven_samples

from dflop.planning import PlanPricer, plan_of
from dflop.planning.bounds import lower_bounds
from dflop.planning.least_links import LeastLinks
from dflop.planning.least_memory import LeastMemory
from dflop.planning.pipelines import MeanPipelines

# Costs are drawn from a seed: a smaller seed is no simpler a case.
_UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
_SLACK = 1 + 1e-9
_NUM_ROWS = 40
_SHAPES = [(2, 1, 6), (4, 1, 8), (4, 2, 8), (6, 2, 9), (8, 2, 10)]
drawn = given(
    shape=st.sampled_from(_SHAPES),
    seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    freeze=st.sampled_from([(), ("vision",), ("llm",)]),
    grouping=st.sampled_from(["balanced", "random"]),
    device_model=st.sampled_from(["cpu", "h100-80g"]),  # what hides no transfers, and what does
)


class Case:
    """Some rows of a drawn space, with the bounds on them and a pricer for each."""

    def __init__(self, spec, shape, seeds, freeze, grouping, device_model):
        devices, num_nodes, batch_size = shape
        costs, samples = bent_costs(seeds[0]), uneven_samples(40, seeds[1])
        if seeds[0] % 2:
            costs, samples = costs_of_squares(costs), with_squares(samples, seeds[1])
        config = make_config(devices, batch_size, num_nodes=num_nodes, freeze=freeze, device_model=device_model)
        batches, splits, rows = space_of(config, spec, costs, samples)
        self.rows = rows.sample(min(_NUM_ROWS, len(rows)), seed=seeds[1])
        links = LeastLinks(costs, spec, config.cluster, freeze, 4)
        self.bounds = lower_bounds(self.rows, batches.shapes, costs, spec, splits, links)
        self.pipelines = MeanPipelines(config, spec, costs, batches, splits, links, grouping)
        self.memory = LeastMemory(spec, costs, batches, splits, grouping, freeze, 4)
        self.pricers = [
            PlanPricer(plan_of(row, splits), config, spec, costs, batches, grouping)
            for row in self.rows.iter_rows(named=True)
        ]
        self.num_batches = len(batches)

    def __iter__(self):
        return zip(range(len(self.rows)), self.rows.iter_rows(named=True), self.pricers, strict=True)


@settings(max_examples=20, phases=_UNSHRUNK)
@drawn
def test_no_plan_is_faster_than_its_bounds(tiny_spec, shape, seeds, freeze, grouping, device_model):
    case = Case(tiny_spec, shape, seeds, freeze, grouping, device_model)
    means_s = case.bounds.means()
    for place, row, pricer in case:
        steps_s = np.array([pricer.step_s(batch) for batch in range(case.num_batches)])
        assert means_s[place] <= _SLACK * steps_s.mean(), row
        of_mean_batch = case.pipelines.of_batches(row, mean=True)
        assert of_mean_batch[0].item() <= _SLACK * steps_s.mean(), row
        (of_mean_s,) = case.bounds.of_pipeline(place, *of_mean_batch)
        assert of_mean_s <= _SLACK * steps_s.mean(), row
        of_each_s = case.bounds.of_pipeline(place, *case.pipelines.of_batches(row))
        assert (of_each_s <= _SLACK * steps_s).all(), row


@settings(max_examples=20, phases=_UNSHRUNK)
@drawn
def test_no_plan_needs_less_memory_than_its_bounds(tiny_spec, shape, seeds, freeze, grouping, device_model):
    case = Case(tiny_spec, shape, seeds, freeze, grouping, device_model)
    for _, row, pricer in case:
        needed = max(max(pricer.memory_bytes(batch).values()) for batch in range(case.num_batches))
        of_llm = case.memory.of_llm(row)
        assert case.memory.of_device(of_llm.max()) <= _SLACK * needed, row
        assert case.memory.least_bytes(row, of_llm) <= _SLACK * needed, row


def test_of_equal_texts_the_bound_is_the_step(tiny_spec, costs, samples):
    """Where no replica waits for another or for an encoder, no bound could be higher."""
    nothing = np.zeros(len(samples), dtype=np.int64)
    texts = replace(samples.take(nothing), num_items=nothing[:, None], kept_tokens=nothing[:, None])
    config = make_config(4, 8, fixed={"num_microbatches": 4, "placement": "colocated"}, freeze=["vision"])
    batches, splits, rows = space_of(config, tiny_spec, costs, texts)
    links = LeastLinks(costs, tiny_spec, config.cluster, ["vision"], 4)
    bounds = lower_bounds(rows, batches.shapes, costs, tiny_spec, splits, links)
    pipelines = MeanPipelines(config, tiny_spec, costs, batches, splits, links, "balanced")
    rows = rows.with_row_index("place").filter(pl.col("llm_dp") * 4 <= 8)
    assert rows["schedule"].n_unique() == 4
    for row in rows.iter_rows(named=True):
        step_s = PlanPricer(plan_of(row, splits), config, tiny_spec, costs, batches, "balanced").step_s(0)
        bound_s = bounds.of_pipeline(row["place"], *pipelines.of_batches(row))[0]
        assert bound_s == pytest.approx(step_s, rel=1e-9), row


def test_an_encoder_of_more_stages_puts_off_the_weights_of_an_llm_that_splits_its_backward(tiny_spec):
    """So the LLM's mean pipeline is another one behind another encoder, and its bound with it."""
    config = make_config(8, 8, fixed={"placement": "disjoint", "schedule": "zb_h1", "num_microbatches": 6})
    costs, samples = bent_costs(5), uneven_samples(40, 6)
    batches, splits, rows = space_of(config, tiny_spec, costs, samples)
    links = LeastLinks(costs, tiny_spec, config.cluster, (), 4)
    pipelines = MeanPipelines(config, tiny_spec, costs, batches, splits, links, "balanced")
    of_encoder: dict[int, set[int]] = {}
    for row in rows.iter_rows(named=True):
        of_encoder.setdefault(row["vision_pp"], set()).add(pipelines.num_before(row))
    assert of_encoder == {1: {1}, 2: {2}, 4: {4}}
