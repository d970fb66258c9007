"""Systems side by side: the same batches, the same prices, whatever each of them decides."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from dflop.balance import RANDOM
from dflop.comparison import (
    OURS,
    SYSTEMS,
    TODAYS,
    compare_systems,
    comparison_frame,
    comparison_json,
    comparison_text,
    systems_of,
)
from dflop.comparison.system import System
from dflop.config import load_config
from dflop.plan import PLACEMENTS
from dflop.report.comparison import plot_comparison
from dflop.schedule import Pricer


def make_config(memory_gib: float, today: dict | None = None, devices: int = 4):
    return load_config(
        {
            "cluster": {"devices_per_node": devices, "memory_gib": memory_gib},
            "train": {"global_batch_size": 16},
            "plan": {"schedules": ["1f1b"], "search_batches": 3, "today": today},
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
    found = system.plans(config, spec, costs, samples)
    assert found
    for plan in [candidate.plan for candidate in found]:
        pricer = Pricer(plan, costs, spec, config.cluster)
        shapes = samples.take(np.arange(16))
        buckets = system.policy.buckets(pricer.problem(shapes), np.random.default_rng(0))
        assert buckets.max() < plan.num_buckets
        assert np.bincount(buckets, minlength=plan.num_buckets).min() >= 1
        assignment = pricer.assign(shapes, *np.divmod(buckets, plan.num_microbatches))
        assert math.isfinite(pricer.step_s(shapes, assignment))


def test_all_are_priced_and_ours_is_last(rows):
    assert [row.name for row in rows] == [*(system.name for system in SYSTEMS), OURS]
    for row in rows:
        assert row.step_s == pytest.approx(np.mean(row.steps_s))
        assert len(row.steps_s) == 2
        assert row.gap >= 0
        assert 0 <= row.idle < 1


def test_systems_have_the_plans_of_their_kind(inputs):
    kinds = {system.name: {candidate.plan.placement for candidate in system.plans(*inputs)} for system in SYSTEMS}
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
    assert [system["name"] for system in said["systems"]] == [row.name for row in rows]
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


# Of four devices; what is left open is as most frameworks do it.
TODAY = {"llm": {"tp": 1, "pp": 2, "dp": 2}, "num_microbatches": 4}


def test_a_system_whose_batches_do_not_fit_recomputes_more_layers_if_it_may(inputs):
    config, spec, costs, samples = inputs
    fastest = next(own for own in SYSTEMS[0].plans(*inputs) if not own.plan.checkpointing)
    system = System(name="tight", plans=lambda *_: [fastest], policy=RANDOM, moves_samples=False)
    roomy, _ = compare_systems(*inputs, num_batches=2, systems=[system])
    assert (roomy.plan, roomy.num_fitted) == (str(fastest.plan), 0)
    tight = replace(config, cluster=replace(config.cluster, memory_gib=0.97 * roomy.memory_bytes / 2**30))
    row, _ = compare_systems(tight, spec, costs, samples, num_batches=2, systems=[system])
    assert "checkpointing" in row.plan
    assert row.num_fitted == 0
    assert row.memory_bytes <= 0.97 * roomy.memory_bytes
    assert row.step_s > roomy.step_s
    moved, _ = compare_systems(
        tight, spec, costs, samples, num_batches=2, systems=[replace(system, moves_samples=True)]
    )
    assert moved.memory_bytes <= 0.97 * roomy.memory_bytes
    system = replace(system, recomputes=lambda _: False)
    row, _ = compare_systems(tight, spec, costs, samples, num_batches=2, systems=[system])
    assert row.why_not.startswith(f"{fastest.plan}: no assignment of the batch was found")


def test_the_layout_of_today_is_a_row_where_the_config_names_one():
    assert systems_of(make_config(64.0)) == SYSTEMS
    first, *others = systems_of(make_config(64.0, TODAY))
    assert (first.name, tuple(others)) == (TODAYS, SYSTEMS)


@pytest.fixture(scope="module")
def with_today(inputs):
    _, spec, costs, samples = inputs
    config = make_config(64.0, TODAY)
    return compare_systems(config, spec, costs, samples, num_batches=2, systems=systems_of(config)[:2])


def test_the_layout_of_today_is_priced_as_it_stands_on_random_batches(with_today):
    todays, _, ours = with_today
    assert todays.plan == "monolithic: vision tp1 pp1 dp2 + llm tp1 pp2 dp2, 4 microbatches, 1f1b"
    assert todays.step_s > ours.step_s
    assert todays.step_s == pytest.approx(np.mean(todays.steps_s))


def test_the_tables_and_the_figure_have_the_layout_of_today(inputs, with_today, tmp_path):
    config, _, costs, _ = inputs
    assert comparison_frame(with_today)["name"].to_list() == [TODAYS, "Megatron-style, random", OURS]
    (first, *_) = json.loads(comparison_json(with_today, config, costs))["systems"]
    assert first["over_ours"] == pytest.approx(with_today[0].step_s / with_today[-1].step_s)
    assert f"\n{TODAYS}: {with_today[0].plan}" in comparison_text(with_today)
    plot_comparison(with_today, tmp_path / "figure.svg")
    assert TODAYS in (tmp_path / "figure.svg").read_text()
