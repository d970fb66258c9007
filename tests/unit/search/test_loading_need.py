"""What a plan asks of loaders: by rank and by machine, and what is said where cores are too few."""

import dataclasses

import polars as pl
import pytest

from dflop.base import UserError
from dflop.config import ClusterConfig
from dflop.loading import LoadingTimes
from dflop.plan import Grid, Plan
from dflop.search import loading_need, loading_note, planned_loaders
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
    assert found.num_processes == 2  # a second of loading a step of a second, and some room
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
    assert doubled.step_s == alone.step_s == pytest.approx(5.0 / 2)
    text = times(vision_s=0.0, llm_s=0.5, num_cores=16)
    plan = dataclasses.replace(divided, grids=(divided.grids[0], Grid(module="llm", num_ranks=4, tp=4, rank_offset=4)))
    assert need(plan, GPUS, text).step_s == pytest.approx((8 * 1.0 + 4 * 20 * 2 * 0.5) / 16)


def test_no_more_processes_than_cores_and_then_loading_sets_the_step():
    found = need(DISJOINT, GPUS, times(vision_s=1.0, llm_s=0.0, num_cores=24))
    assert found.num_processes == 3
    assert found.step_s == pytest.approx(10.0 / 3)
    note = loading_note(found, 1.0)
    assert "Loading bounds this run: on 24 cores a node the step will take about 3.33 s" in note
    assert "data.video" in note


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


@pytest.mark.parametrize(("text", "number"), [("plan: {}", 1), ("loading: {processes: 3}", 3), ("", 1)])
def test_training_takes_the_number_from_the_plan(text, number, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    assert planned_loaders(path) == number


@pytest.mark.parametrize("value", ["0", "many", "1.5", "true"])
def test_a_number_that_cannot_be_is_refused(value, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(f"loading: {{processes: {value}}}")
    with pytest.raises(UserError, match=r"plan.yaml: `loading.processes` is .*at least 1"):
        planned_loaders(path)
