"""Sizes of a cluster and parts of ours, each as a table."""

import math

import numpy as np
import pytest
from click.testing import CliRunner

from dflop.base import UserError
from dflop.cli import cli
from dflop.comparison import (
    ABLATION,
    OURS,
    SystemRow,
    compare_systems,
    keys_of_size,
    scaling_frame,
    scaling_text,
)
from dflop.config import load_config
from dflop.schedule import Pricer


def sized(num_nodes=2, per_node=8, batch_size=64):
    cluster = {"num_nodes": num_nodes, "devices_per_node": per_node}
    return load_config({"cluster": cluster, "train": {"global_batch_size": batch_size}})


@pytest.mark.parametrize(("num_devices", "shape"), [(8, (1, 8, 32)), (4, (1, 4, 16)), (1024, (128, 8, 4096))])
def test_a_cluster_of_another_size_has_the_same_nodes_and_as_many_samples_a_device(num_devices, shape):
    config = load_config(
        {"cluster": {"num_nodes": 2, "devices_per_node": 8}, "train": {"global_batch_size": 64}},
        *keys_of_size(sized(), num_devices),
    )
    assert (config.cluster.num_nodes, config.cluster.devices_per_node, config.train.global_batch_size) == shape


def test_the_layout_of_today_is_of_its_own_size_alone():
    today = {"plan": {"today": {"llm": {"tp": 1, "pp": 1, "dp": 16}}}}
    cluster = {"cluster": {"num_nodes": 2, "devices_per_node": 8}, "train": {"global_batch_size": 64}}
    config = load_config(cluster, today)
    assert load_config(cluster, today, *keys_of_size(config, 8)).plan.today is None
    assert load_config(cluster, today, *keys_of_size(config, 16)).plan.today == config.plan.today
    rows = [SystemRow(name=name, step_s=2.0, plan="p", steps_s=[2.0]) for name in ("today", OURS)]
    lines = scaling_text({8: rows[1:], 16: rows}).splitlines()
    assert lines[1].split() == ["today", "of", "another", "size", "2", "s", "1.000x"]


def test_sizes_that_are_no_cluster_say_what_is_wrong():
    with pytest.raises(UserError, match=r"12 devices are no whole nodes of 8"):
        keys_of_size(sized(), 12)
    with pytest.raises(UserError, match=r"1 devices would have no whole batch: `train.global_batch_size` is 63"):
        keys_of_size(sized(batch_size=63), 1)


def test_the_table_of_sizes_has_each_system_at_each_size():
    rows = [SystemRow(name="other", step_s=3.0, plan="p", steps_s=[3.0]), SystemRow(name=OURS, step_s=2.0, plan="p")]
    found = {8: rows, 64: [SystemRow(name="other", why_not="too large"), rows[1]]}
    frame = scaling_frame(found)
    assert frame.select("devices", "name").rows() == [(8, "other"), (8, OURS), (64, "other"), (64, OURS)]
    lines = scaling_text(found).splitlines()
    assert lines[1].split() == ["other", "3", "s", "1.500x", "nothing", "fits"]
    assert lines[2].split() == [OURS, "2", "s", "1.000x", "2", "s", "1.000x"]


@pytest.fixture(scope="module")
def inputs(costs, tiny_spec, draw_samples):
    config = load_config(
        {
            "cluster": {"devices_per_node": 4, "memory_gib": 64.0},
            "train": {"global_batch_size": 16},
            "plan": {"search_batches": 3},
        }
    )
    return config, tiny_spec, costs, draw_samples(96, seed=3)


@pytest.mark.parametrize("system", ABLATION, ids=lambda system: system.name)
def test_every_part_alone_fills_every_bucket_and_keeps_to_its_space(inputs, system):
    config, spec, costs, samples = inputs
    plans = [candidate.plan for candidate in system.plans(config, spec, costs, samples)]
    assert plans
    for plan in plans:
        assert system.name.startswith("without") or not any(plan.attention_kept_of("llm"))
        if system.name.startswith("only") and system.name != "only plan":
            assert plan.placement == "monolithic"
        if system.name in ("only plan", "only balance", "only order", "only sharding", "without schedule"):
            assert plan.schedule == "1f1b"
        if system.name in ("only plan", "only schedule", "without sharding"):
            assert {grid.sharding for grid in plan.grids} == {"optimizer"}
        pricer = Pricer(plan, costs, spec, config.cluster)
        shapes = samples.take(np.arange(16))
        buckets = system.policy.buckets(pricer.problem(shapes), np.random.default_rng(0))
        assert np.bincount(buckets, minlength=plan.num_buckets).min() >= 1
        assignment = pricer.assign(shapes, *np.divmod(buckets, plan.num_microbatches))
        assert math.isfinite(pricer.step_s(shapes, assignment))


def test_an_order_changes_no_group_of_samples(inputs):
    config, spec, costs, samples = inputs
    by_name = {system.name: system for system in ABLATION}
    plan = by_name["only order"].plans(config, spec, costs, samples)[0].plan
    pricer, shapes = Pricer(plan, costs, spec, config.cluster), samples.take(np.arange(16))
    groups = []
    for name in ("only order", "Megatron-style, random"):
        cell = by_name[name].policy.buckets(pricer.problem(shapes), np.random.default_rng(0))
        groups.append({tuple(np.flatnonzero(cell == bucket)) for bucket in range(plan.num_buckets)})
    assert groups[0] == groups[1]


def test_parts_are_rows_of_a_comparison(inputs):
    rows = compare_systems(*inputs, num_batches=1, systems=ABLATION[:2])
    assert [row.name for row in rows] == [*(system.name for system in ABLATION[:2]), OURS]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--scale", "8,many"], "give numbers of devices with commas"),
        (["--scale", "3,5"], "would have no whole batch"),
    ],
)
def test_what_cannot_be_compared_is_one_line(options, said, tmp_path):
    files = ["--shapes", "s.duckdb", "--costs", "c.duckdb", "--out", str(tmp_path / "o.parquet")]
    base = ["--config", "config/config.yaml", "--config", "train.global_batch_size=63"]
    base += ["--config", "cluster.devices_per_node=8", "--config", "cluster.num_nodes=1"]
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(cli, ["compare", *files, *base, *options], catch_exceptions=False, standalone_mode=False)
