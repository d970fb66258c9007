"""Systems side by side: the same batches, the same prices, whatever each of them decides."""

import json
import math

import numpy as np
import pytest

from dflop.comparison import OURS, SYSTEMS, compare_systems, comparison_frame, comparison_json, comparison_text
from dflop.comparison.system import Batch
from dflop.config import load_config
from dflop.parallelism import PLACEMENTS
from dflop.pricing import Pricer


def make_config(memory_gib: float):
    return load_config(
        {
            "cluster": {"devices_per_node": 4, "memory_gib": memory_gib},
            "train": {"global_batch_size": 16},
            "plan": {"schedules": ["1f1b"], "search_batches": 3},
        }
    )


@pytest.fixture(scope="module")
def inputs(costs, tiny_spec, draw_samples):
    config = make_config(64.0)
    return config, tiny_spec, costs, draw_samples(96, seed=3)


@pytest.fixture(scope="module")
def rows(inputs):
    return compare_systems(*inputs, num_batches=2)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_system_puts_each_sample_into_one_bucket_and_leaves_none_empty(inputs, system):
    config, spec, costs, samples = inputs
    plans = system.plans(config, spec, costs, samples)
    assert plans
    for plan in plans:
        pricer = Pricer(plan, costs, spec, config.cluster)
        shapes = samples.take(np.arange(16))
        assignment = system.decide(Batch(pricer=pricer, shapes=shapes, rng=np.random.default_rng(0)))
        dp = plan.grid("llm").dp
        buckets = assignment.llm_dp_rank * plan.num_microbatches + assignment.microbatch
        assert assignment.llm_dp_rank.max() < dp
        assert np.bincount(buckets, minlength=plan.num_buckets).min() >= 1
        assert math.isfinite(pricer.step_s(shapes, assignment))


def test_all_are_priced_and_ours_is_last(rows):
    assert [row.name for row in rows] == [*(system.name for system in SYSTEMS), OURS]
    for row in rows:
        assert row.step_s == pytest.approx(np.mean(row.steps_s))
        assert len(row.steps_s) == 2
        assert row.gap >= 0
        assert 0 <= row.idle < 1


def test_systems_have_the_plans_of_their_kind(inputs):
    config, spec, costs, samples = inputs
    kinds = {system.name: {plan.placement for plan in system.plans(config, spec, costs, samples)} for system in SYSTEMS}
    assert kinds["DistTrain-style"] == kinds["DFLOP as published"] == {"disjoint"}
    assert kinds["OrchMLLM-style"] == kinds["LoongForge-style"] == {"colocated"}
    assert kinds["FSDP, random"] == kinds["Megatron-style, random"] == {"monolithic"}
    assert set().union(*kinds.values()) <= set(PLACEMENTS)


def test_the_tables_say_what_was_found(rows, inputs):
    frame = comparison_frame(rows)
    by_name = {row["name"]: row for row in frame.to_dicts()}
    assert by_name["Megatron-style, random"]["speed_up"] == 1.0
    assert by_name[OURS]["over_ours"] == 1.0
    assert by_name[OURS]["speed_up"] == pytest.approx(by_name["Megatron-style, random"]["over_ours"])
    said = json.loads(comparison_json(rows, inputs[0], inputs[2]))
    assert [own["name"] for own in said["systems"]] == [row.name for row in rows]
    text = comparison_text(rows)
    for row in rows:
        assert f"\n{row.name}: {row.plan}" in text


def test_a_system_that_nothing_fits_of_says_so(inputs):
    _, spec, costs, samples = inputs
    rows = compare_systems(make_config(0.012), spec, costs, samples, num_batches=1)
    without = [row for row in rows if row.plan is None]
    assert without
    for row in without:
        assert row.why_not
        assert row.why_not in comparison_text(rows)
