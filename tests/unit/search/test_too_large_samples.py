"""A sample that no plan holds is left out of planning by name; a plan holds every other one, drawn or not."""

import dataclasses

import numpy as np
import pytest
from spaces import make_config

from dflop.base import UserError
from dflop.schedule import GlobalBatches, alone_bytes, leave_out_too_large
from dflop.search import (
    enumerate_space,
    leave_out_what_no_plan_holds,
    plan_of,
    pricer_of,
)

CONFIG = make_config(4, 8, memory_gib=1.0)


def with_a_giant(samples, index, num_tokens):
    tokens = samples.llm_tokens.copy()
    tokens[index] = num_tokens
    return dataclasses.replace(samples, llm_tokens=tokens)


def undrawn(samples) -> int:
    """A sample that is in none of the batches that plans are priced on."""
    drawn = GlobalBatches(len(samples), 8, CONFIG.seed)
    return min(set(range(len(samples))) - {int(index) for step in range(3) for index in drawn[step]})


def test_a_sample_that_no_plan_holds_is_left_out_and_the_chosen_plan_leaves_out_no_other(
    search, samples, costs, tiny_spec
):
    giant = with_a_giant(samples, 5, 2_000_000)
    kept, left_out = leave_out_what_no_plan_holds(CONFIG, tiny_spec, costs, giant)
    assert left_out["sample_id"].to_list() == ["s5"]
    with pytest.raises(UserError, match="no plan fits"):
        search(CONFIG, samples=giant)
    best = search(CONFIG, samples=kept).best
    again, same = leave_out_too_large(pricer_of(best.plan, CONFIG, tiny_spec, costs), giant)
    assert again.sample_id.tolist() == kept.sample_id.tolist()
    assert same["sample_id"].to_list() == ["s5"]


def test_costs_that_lack_a_module_are_refused_with_what_they_hold_and_how_to_measure_the_rest(
    search, samples, costs, tiny_spec
):
    of_llm = dataclasses.replace(costs, times={key: form for key, form in costs.times.items() if key[0] == "llm"})
    for ask in (
        lambda: leave_out_what_no_plan_holds(CONFIG, tiny_spec, of_llm, samples),
        lambda: search(CONFIG, costs=of_llm),
    ):
        with pytest.raises(UserError) as caught:
            ask()
        message = str(caught.value)
        assert "no measured costs for vision (there are: llm tp=1)" in message
        assert "run `dflop profile-costs --module vision`" in message


def test_what_some_plan_holds_is_kept_and_no_plan_that_does_not_hold_it_is_a_candidate(
    search, samples, costs, tiny_spec
):
    large = with_a_giant(samples, undrawn(samples), 60_000)
    needs = [
        float(alone_bytes(pricer_of(plan_of(row, {}), CONFIG, tiny_spec, costs), large).max())
        for row in enumerate_space(CONFIG, tiny_spec, costs.layouts, {}).iter_rows(named=True)
    ]
    limit = float(np.median(needs))
    config = make_config(4, 8, memory_gib=limit / 2**30)
    kept, left_out = leave_out_what_no_plan_holds(config, tiny_spec, costs, large)
    assert kept is large
    assert left_out.is_empty()
    for own in search(config, samples=large).candidates:
        assert alone_bytes(pricer_of(own.plan, config, tiny_spec, costs), large).max() <= limit
        assert max(own.memory_bytes.values()) <= limit


def test_where_every_sample_is_too_large_none_is_left_out_and_the_search_says_why(search, samples, costs, tiny_spec):
    config = make_config(4, 8, memory_gib=0.004)
    kept, left_out = leave_out_what_no_plan_holds(config, tiny_spec, costs, samples)
    assert kept is samples
    assert left_out.is_empty()
    with pytest.raises(UserError, match=r"no plan fits into `cluster\.memory_gib` = 0\.004"):
        search(config)
