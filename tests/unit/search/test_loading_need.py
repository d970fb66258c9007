"""What a plan asks of loaders: by rank and by machine, and what is said where cores are too few."""

import dataclasses

import numpy as np
import polars as pl
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.config import ClusterConfig
from dflop.loading import LoadingTimes
from dflop.plan import Grid, Plan
from dflop.search import loading_need, loading_note, planned_loaders
from dflop.search.loader_processes import _divided
from dflop.store import LOADING_SCHEMA


def times(*, vision_s: float, llm_s: float, num_cores: int) -> LoadingTimes:
    """Of samples that all have a picture; all threads together take twice as long."""
    rows = [
        (module, "image", 10, 1, 0, own_s, 2 * own_s, 0.0, num_cores)
        for module, own_s in (("vision", vision_s), ("llm", llm_s))
    ]
    return LoadingTimes(pl.DataFrame(rows, schema=LOADING_SCHEMA, orient="row"))


def plan_of(placement: str, vision: Grid, llm: Grid) -> Plan:
    return Plan(placement=placement, grids=(vision, llm), num_microbatches=4)


DISJOINT = plan_of(
    "disjoint",
    Grid(module="vision", num_ranks=2),
    Grid(module="llm", num_ranks=6, pp=3, rank_offset=2),
)
GPUS = ClusterConfig(device="cuda", num_nodes=1, devices_per_node=8)


def need(plan: Plan, cluster: ClusterConfig, loading: LoadingTimes, *, step_s: float = 1.0, idle: float = 0.0):
    return loading_need(plan, loading, cluster, global_batch_size=20, step_s=step_s, idle=idle)


def test_encoder_ranks_share_the_media_and_the_ends_of_the_llm_read_text():
    found = need(DISJOINT, GPUS, times(vision_s=0.1, llm_s=0.01, num_cores=64))
    assert found.rank_s == pytest.approx(20 * 0.1 / 2)
    assert found.processes == (2, 2, 1, 1, 0, 0, 1, 1)  # with some room; the LLM's middle stage reads nothing
    assert found.step_s == 1.0
    text_bound = need(DISJOINT, GPUS, times(vision_s=0.001, llm_s=0.1, num_cores=64))
    assert text_bound.rank_s == pytest.approx(20 * 0.1 / 2)


def test_a_rank_of_several_nodes_loads_for_all_of_them():
    shared = plan_of("colocated", Grid(module="vision", num_ranks=4), Grid(module="llm", num_ranks=4, pp=2))
    found = need(shared, GPUS, times(vision_s=0.1, llm_s=0.02, num_cores=64))
    assert found.rank_s == pytest.approx(20 * 0.1 / 4 + 20 * 0.02 / 2)


def test_one_rank_of_a_tensor_parallel_group_decodes_for_all_and_each_reads_text():
    alone = need(DISJOINT, GPUS, times(vision_s=0.5, llm_s=0.0, num_cores=16))
    divided = plan_of(
        "disjoint", Grid(module="vision", num_ranks=4, tp=2), Grid(module="llm", num_ranks=4, rank_offset=4)
    )
    doubled = need(divided, GPUS, times(vision_s=0.5, llm_s=0.0, num_cores=16))
    assert doubled.rank_s == alone.rank_s
    assert doubled.step_s == alone.step_s == pytest.approx((8 * 1.0 + 20 * 2 * 0.5) / 16)
    text = times(vision_s=0.0, llm_s=0.5, num_cores=16)
    plan = dataclasses.replace(divided, grids=(divided.grids[0], Grid(module="llm", num_ranks=4, tp=4, rank_offset=4)))
    assert need(plan, GPUS, text).step_s == pytest.approx((8 * 1.0 + 4 * 20 * 2 * 0.5) / 16)


def test_ranks_that_decode_share_the_cores_that_others_do_not_need():
    """Two ranks decode, four read little. With the same number on all ranks these two had 3 of 24 cores each."""
    found = need(DISJOINT, GPUS, times(vision_s=1.0, llm_s=0.001, num_cores=24))
    assert found.processes == (6, 6, 1, 1, 0, 0, 1, 1)  # and a core for each of the eight ranks
    assert found.step_s == pytest.approx(
        (8 * 1.0 + 20 * 2 * (1.0 + 2 * 0.001)) / 24
    )  # cores, of which decoders use two
    note = loading_note(found, 1.0)
    assert "6 loader processes there, 16 in all" in note
    assert "Loading bounds this run: on 24 cores a node the step will take about 2 s" in note
    assert "data.video" in note
    enough = need(DISJOINT, GPUS, times(vision_s=1.0, llm_s=0.001, num_cores=64))
    assert enough.processes == (12, 12, 1, 1, 0, 0, 1, 1)
    assert "bounds" not in loading_note(enough, 1.0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0, 20).map(lambda number: round(number, 1)), min_size=1, max_size=5),
    st.integers(0, 12),
)
def test_no_other_way_to_divide_the_cores_shortens_the_longest_loading(rank_s, cores):
    shares = np.array(rank_s)
    found = _divided(cores, shares, 1.0)
    loads = shares > 0
    assert (found[~loads] == 0).all()
    assert (found[loads] >= 1).all()
    assert found.sum() <= max(cores, loads.sum())
    longest = (shares / np.maximum(found, 1)).max()
    if 1.2 * longest > 1.0:
        needed = np.ceil(shares[loads] / (longest - 1e-9)).sum()  # processes with which all loading takes less
        assert needed > cores


def test_on_cpus_ranks_and_loaders_share_the_cores():
    cluster = ClusterConfig(device="cpu", num_nodes=1, devices_per_node=2)
    plan = plan_of("disjoint", Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=1, rank_offset=1))
    loading = times(vision_s=0.01, llm_s=0.0, num_cores=2)  # 0.4 s of cores a step
    assert need(plan, cluster, loading, idle=0.5).step_s == 1.0  # the idle cores have room for it
    busy = need(plan, cluster, loading, idle=0.1)
    assert busy.step_s == pytest.approx((2 * 0.9 + 0.4) / 2)
    assert "bounds" not in loading_note(need(plan, cluster, loading, idle=0.5), 1.0)


def test_each_machine_has_its_own_cores():
    """All encoder ranks are on the first of two nodes."""
    cluster = ClusterConfig(device="cuda", num_nodes=2, devices_per_node=2)
    plan = plan_of("disjoint", Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=2, rank_offset=2))
    found = need(plan, cluster, times(vision_s=0.1, llm_s=0.0, num_cores=4))
    assert found.step_s == pytest.approx((2 * 1.0 + 2 * 2.0) / 4)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", [1, 1, 1]),
        ("loading: null", [1, 1, 1]),
        ("loading: {processes: 3}", [3, 3, 3]),
        ("loading: {processes: 3, processes_of_ranks: 3 0 1}", [3, 1, 1]),
    ],
)
def test_training_takes_the_numbers_from_the_plan(text, numbers, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(f"plan: {{}}\n{text}")
    assert planned_loaders(path, 3) == numbers


def test_the_numbers_of_a_plan_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "plan.yaml"
    found = need(DISJOINT, GPUS, times(vision_s=1.0, llm_s=0.001, num_cores=24))
    path.write_text(yaml.safe_dump({"plan": {}, "loading": found.to_dict()}))
    assert planned_loaders(path, 8) == [max(1, number) for number in found.processes]


@pytest.mark.parametrize("value", ["-1 1 1", "many", "1.5 1 1", "true", "1 2", "[1, 1, 1]"])
def test_numbers_that_cannot_be_are_refused(value, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(f"plan: {{}}\nloading: {{processes_of_ranks: {value}}}")
    with pytest.raises(UserError, match=r"plan.yaml: .*`loading.processes_of_ranks`.* each of the 3 ranks"):
        planned_loaders(path, 3)
