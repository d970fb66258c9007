"""A plan refuses what cannot run, and comes back from its file as it was written."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dflop.errors import UserError
from dflop.pipeline import Grid, Plan, Worker, load_plan, plan_from_dict, split_layers


def make_plan(vision_dp=1, llm_pp=1, llm_dp=1, num_microbatches=2, **more) -> Plan:
    return Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=vision_dp),
            Grid(module="llm", num_ranks=llm_pp * llm_dp, pp=llm_pp, rank_offset=vision_dp),
        ),
        num_microbatches=num_microbatches,
        **more,
    )


plans = st.builds(
    make_plan,
    vision_dp=st.integers(1, 4),
    llm_pp=st.integers(1, 4),
    llm_dp=st.integers(1, 4),
    num_microbatches=st.integers(1, 9),
    checkpointing=st.booleans(),
)


@given(plans)
def test_workers_come_by_rising_rank_and_cover_the_world(plan):
    ranks = [plan.grid(worker.module).first_rank(worker.pp_stage, worker.dp_rank) for worker in plan.workers]
    assert ranks == list(range(plan.world_size))
    assert plan.num_buckets == plan.grid("llm").dp * plan.num_microbatches


def test_the_encoder_comes_first_then_the_llms_stages_by_replica():
    assert make_plan(vision_dp=1, llm_pp=2, llm_dp=2).workers == (
        Worker("vision", 0, 0),
        Worker("llm", 0, 0),
        Worker("llm", 0, 1),
        Worker("llm", 1, 0),
        Worker("llm", 1, 1),
    )


@given(plans)
def test_a_plan_comes_back_from_its_dict(plan):
    assert plan_from_dict(yaml.safe_load(yaml.safe_dump(plan.to_dict()))) == plan


def test_a_plan_comes_back_from_its_file_with_whatever_stands_beside_it(tmp_path):
    path = tmp_path / "plan.yaml"
    plan = make_plan(vision_dp=2, llm_pp=2, llm_dp=3)
    path.write_text(yaml.safe_dump({"why": "because", "plan": plan.to_dict(), "predicted": {"step_s": 1.0}}))
    assert load_plan(path) == plan


@pytest.mark.parametrize("text", ["", "plan:", "plan: [1]", "plan: {placement: disjoint}", "plan: {", "just words"])
def test_a_file_without_a_plan_says_how_to_make_one(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"plan\.yaml holds no plan .*make it again with `dflop plan`"):
        load_plan(path)


def test_a_missing_plan_says_which_command_makes_it(tmp_path):
    with pytest.raises(UserError, match="does not exist; make it with `dflop plan`"):
        load_plan(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("vision", "llm", "complaint"),
    [
        ({"pp": 2}, {}, "vision: pp=2, but encoders run in one stage; use pp: 1"),
        ({}, {"tp": 2}, "llm: tp=2, but tensor parallelism cannot run yet; use tp: 1"),
        ({"tp": 2}, {}, "vision: tp=2, but tensor parallelism cannot run yet"),
        ({}, {"rank_offset": 1}, "rank 1 is owned by vision and llm"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(vision, llm, complaint):
    with pytest.raises(UserError, match=complaint):
        Plan(
            placement="disjoint",
            grids=(
                Grid(module="vision", num_ranks=2, **vision),
                Grid(module="llm", num_ranks=2, **{"rank_offset": 2, **llm}),
            ),
            num_microbatches=1,
        )


def test_a_plan_reads_as_one_line():
    assert str(make_plan(vision_dp=2, llm_pp=3, checkpointing=True)) == (
        "disjoint: vision tp1 pp1 dp2 + llm tp1 pp3 dp1, 2 microbatches, 1f1b, checkpointing"
    )


@given(pp=st.integers(1, 12), more=st.integers(0, 40))
def test_layers_are_split_in_order_into_stages_that_differ_by_one_at_most(pp, more):
    stages = split_layers(pp + more, pp)
    assert [layer for stage in stages for layer in stage] == list(range(pp + more))
    lengths = [len(stage) for stage in stages]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UserError, match="3 layers cannot be split into 4 pipeline stages"):
        split_layers(3, 4)
