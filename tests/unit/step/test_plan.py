"""A plan refuses what cannot run, and comes back from its file as it was written."""

import dataclasses

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from small_plans import disjoint

from dflop.base import UserError
from dflop.plan import Grid, Plan, check_layers, load_plan, plan_from_dict, split_layers

plans = st.builds(
    disjoint,
    vision_dp=st.integers(1, 4),
    llm_pp=st.integers(1, 4),
    llm_dp=st.integers(1, 4),
    num_microbatches=st.integers(1, 9),
    checkpointing=st.booleans(),
)


@given(plans)
def test_a_plan_comes_back_from_its_dict(plan):
    assert plan_from_dict(yaml.safe_load(yaml.safe_dump(plan.to_dict()))) == plan


def test_a_plan_comes_back_from_its_file_with_whatever_stands_beside_it(tmp_path):
    path = tmp_path / "plan.yaml"
    plan = disjoint(vision_dp=2, llm_pp=2, llm_dp=3)
    path.write_text(yaml.safe_dump({"why": "because", "plan": plan.to_dict(), "predicted": {"step_s": 1.0}}))
    assert load_plan(path) == plan


def test_a_missing_field_is_named(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("plan: {placement: disjoint}")
    with pytest.raises(UserError, match=r"plan\.yaml: `plan.grids` is missing; it must hold a grid for each module"):
        load_plan(path)


@pytest.mark.parametrize("text", ["", "plan:", "plan: [1]", "plan: {", "just words"])
def test_a_file_without_a_plan_says_how_to_make_one(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"plan\.yaml holds no plan .*make it again with `dflop plan`"):
        load_plan(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"checkpointing": "maybe"}, "`plan.checkpointing` is 'maybe'; it must be true or false"),
        ({"checkpointing": 1}, "`plan.checkpointing` is 1; it must be true or false"),
        ({"num_microbatches": 2.0}, "`plan.num_microbatches` is 2.0; it must be a whole number from 1 to 65536"),
        ({"num_microbatches": float("nan")}, "`plan.num_microbatches` is nan; it must be a whole number"),
        ({"num_microbatches": True}, "`plan.num_microbatches` is true; it must be a whole number"),
        ({"num_microbatches": 10**9}, "`plan.num_microbatches` is 1000000000; it must be .* to 65536"),
        ({"num_chunks": 0}, "`plan.num_chunks` is 0; it must be a whole number from 1"),
        ({"placement": ["disjoint"]}, r"`plan.placement` is \['disjoint'\]; it must be one of bubble_filled"),
        ({"schedule": None}, "`plan.schedule` is null; it must be one of"),
        ({"schedule": "zb_h1"}, "`plan.schedule` is 'zb_h1', which was removed; it must be one of gpipe, inter"),
        ({"grids": None}, "`plan.grids` is None; it must hold a grid for each module"),
        ({"num_microbatchs": 2}, "unknown field `plan.num_microbatchs` .*did you mean `plan.num_microbatches`"),
    ],
)
def test_a_field_that_a_hand_got_wrong_is_named_with_what_would_be_right(tmp_path, change, complaint):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"plan": disjoint(llm_pp=2).to_dict() | change}))
    with pytest.raises(UserError, match=rf"plan\.yaml: {complaint}"):
        load_plan(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tp": True}, "`plan.grids.llm.tp` is true; it must be a whole number from 1"),
        ({"pp": "2"}, "`plan.grids.llm.pp` is '2'; it must be a whole number from 1"),
        ({"dp": 2}, "`plan.grids.llm.dp` is 2, but num_ranks: 2 with tp: 1 and pp: 2 make dp: 1; .* num_ranks: 4"),
        ({"rank_offset": -1}, "`plan.grids.llm.rank_offset` is -1; it must be a whole number from 0"),
        ({"rank_ofset": 1}, "unknown field `plan.grids.llm.rank_ofset` .*did you mean `plan.grids.llm.rank_offset`"),
        ({"layers": 4}, "`plan.grids.llm.layers` is 4; it must be a list of whole numbers"),
        ({"layers": [2, 2.0]}, r"`plan.grids.llm.layers\[1\]` is 2.0; it must be a whole number from 1"),
        ({"layers": [2, 1, 1]}, r"llm: layers is \[2, 1, 1\], but pp=2 makes 2 stages; .* out for an even split"),
        ({"layers": []}, r"`plan.grids.llm.layers` is \[\]; it must be a list of whole numbers, one a stage, or null"),
        ({"recomputed": 4}, "`plan.grids.llm.recomputed` is 4; it must be a list of whole numbers"),
        ({"recomputed": [2, -1]}, r"`plan.grids.llm.recomputed\[1\]` is -1; it must be a whole number from 0"),
        ({"recomputed": []}, r"`plan.grids.llm.recomputed` is \[\]; it must be a list of whole numbers, one a stage"),
        (
            {"recomputed": [2]},
            r"llm: recomputed is \[2\], but pp=2 makes 2 stages; .* out of all grids to recomp",
        ),
        (
            {"recomputed": [1, 0]},
            r"llm: recomputed is \[1, 0\], but the plan has no checkpointing; use checkpointing: true, or leave",
        ),
        (
            {"recomputed": [2, 1], "attention_kept": [1, 2]},
            r"llm: attention_kept is \[1, 2\], and recomputed \[2, 1\]; attention is kept in none to all of the layers",
        ),
        ({"attention_kept": [1, 1]}, r"llm: attention_kept is \[1, 1\], and recomputed \[\]; .* give both, one number"),
        ({"offloaded": [1]}, r"llm: offloaded is \[1\], but pp=2 makes 2 stages; .* leave offloaded out to offload no"),
        ({"offloaded": [1, -1]}, r"`plan.grids.llm.offloaded\[1\]` is -1; it must be a whole number from 0"),
        ({"num_ranks": 10**12}, "`plan.grids.llm.num_ranks` is 1000000000000; it must be .* to 1000000"),
    ],
)
def test_a_grid_that_a_hand_got_wrong_is_named_with_what_would_be_right(change, complaint):
    values = disjoint(llm_pp=2).to_dict()
    values["grids"]["llm"] |= change
    with pytest.raises(UserError, match=complaint):
        plan_from_dict(values)


def test_some_layers_of_each_stage_are_recomputed_all_or_none():
    plan = disjoint(llm_pp=2, checkpointing=True)
    assert plan.recomputed_of("llm", 5) == (3, 2)
    assert disjoint(llm_pp=2).recomputed_of("llm", 5) == (0, 0)
    some = [dataclasses.replace(grid, recomputed=own) for grid, own in zip(plan.grids, ((0,), (3, 1)), strict=True)]
    plan = dataclasses.replace(plan, grids=tuple(some))
    assert plan.recomputed_of("llm", 5) == (3, 1)
    assert str(plan).endswith(", checkpointing (layers vision 0, llm 3+1)")
    assert plan_from_dict(yaml.safe_load(yaml.safe_dump(plan.to_dict()))) == plan


def test_some_of_the_recomputed_layers_are_so_but_for_attention():
    values = disjoint(llm_pp=2, checkpointing=True).to_dict()
    values["grids"]["llm"] |= {"recomputed": [3, 1], "attention_kept": [2, 0]}
    plan = plan_from_dict(values)
    assert (plan.recomputed_of("llm", 5), plan.attention_kept_of("llm")) == ((3, 1), (2, 0))
    assert str(plan).endswith(", checkpointing (layers vision 0, llm 3+1, 2+0 of them but for attention)")
    assert plan_from_dict(yaml.safe_load(yaml.safe_dump(plan.to_dict()))) == plan
    values["grids"]["vision"] |= {"recomputed": [1], "attention_kept": [1]}
    with pytest.raises(UserError, match=r"vision: attention_kept is \[1\]; only the LLM's layers"):
        plan_from_dict(values)


def test_layers_ahead_of_the_recomputed_ones_may_be_offloaded():
    values = disjoint(llm_pp=2, checkpointing=True).to_dict()
    values["grids"]["llm"] |= {"recomputed": [1, 0], "offloaded": [2, 1]}
    plan = plan_from_dict(values)
    assert plan.offloaded_of("llm", 5) == (2, 1)
    assert plan.offloaded_of("vision", 5) == (0,)
    assert "(offloaded 2+1)" in str(plan)
    assert plan_from_dict(yaml.safe_load(yaml.safe_dump(plan.to_dict()))) == plan
    with pytest.raises(
        UserError, match=r"llm.offloaded\[0\]` is 2; the stage has 2 layers, recomputes 1 and .* at most 1"
    ):
        plan.offloaded_of("llm", 4)


def test_a_grid_recomputes_nothing_where_it_leaves_to_another_to_say_how_much():
    values = disjoint(llm_pp=2, checkpointing=True).to_dict()
    values["grids"]["llm"]["recomputed"] = [1, 0]
    plan = plan_from_dict(values)
    assert (plan.recomputed_of("vision", 3), plan.recomputed_of("llm", 5)) == ((0,), (1, 0))
    assert str(plan).endswith(", checkpointing (layers vision 0, llm 1+0)")
    assert plan_from_dict(plan.to_dict()) == plan
    values["grids"]["llm"]["recomputed"] = None
    assert plan_from_dict(values) == disjoint(llm_pp=2, checkpointing=True)
    del values["grids"]["llm"]["recomputed"], values["grids"]["vision"]["recomputed"]
    assert plan_from_dict(values).recomputed_of("vision", 3) == (3,)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"recomputed": [0, 9]}, r"`plan\.grids\.llm\.recomputed\[1\]` is 9; the stage has 2 layers: use at most 2"),
        (
            {"layers": [4, 1], "recomputed": [0, 2]},
            r"`plan\.grids\.llm\.recomputed\[1\]` is 2; the stage has 1 layer: use at most 1",
        ),
        ({"layers": [4, 2]}, r"llm: the plan's layers \[4, 2\] are 6 together, the model has 5"),
    ],
)
def test_layers_that_the_model_does_not_have_are_named_with_the_file(tmp_path, change, complaint):
    values = disjoint(llm_pp=2, checkpointing=True).to_dict()
    values["grids"]["llm"] |= change
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"plan": values}))
    with pytest.raises(UserError, match=rf"plan\.yaml: {complaint}"):
        check_layers(path, load_plan(path), {"vision": 3, "llm": 5})


def test_a_grid_may_leave_out_its_dp():
    values = disjoint(llm_pp=2).to_dict()
    for grid in values["grids"].values():
        del grid["dp"]
    assert plan_from_dict(values) == disjoint(llm_pp=2)


def test_a_missing_plan_says_which_command_makes_it(tmp_path):
    with pytest.raises(UserError, match="does not exist; make it with `dflop plan`"):
        load_plan(tmp_path / "plan.yaml")


def shared(placement, vision: dict, llm: dict, **more) -> Plan:
    return Plan(
        placement=placement,
        grids=(Grid(module="vision", **vision), Grid(module="llm", **llm)),
        **{"num_microbatches": 4} | more,
    )


def test_a_plan_with_all_that_there_is_comes_back_from_its_dict():
    llm = {"num_ranks": 8, "pp": 4, "layers": (2, 1, 1, 1, 1, 1, 1, 1)}
    plan = shared("colocated", {"num_ranks": 8, "tp": 2}, llm, schedule="interleaved_1f1b", num_chunks=2)
    assert plan_from_dict(yaml.safe_load(yaml.safe_dump(plan.to_dict()))) == plan


def test_a_file_from_before_chunks_and_layers_still_loads():
    values = disjoint(llm_pp=2).to_dict()
    del values["num_chunks"]
    for grid in values["grids"].values():
        del grid["layers"]
    assert plan_from_dict(values) == disjoint(llm_pp=2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nearby", {"num_ranks": 2}, {"num_ranks": 2}), "placement is 'nearby'; it must be one of bubble_filled, co"),
        (("disjoint", {"num_ranks": 2}, {"num_ranks": 2, "rank_offset": 1}), "rank 1 is owned by vision and llm"),
        (
            ("colocated", {"num_ranks": 2}, {"num_ranks": 4}),
            "2 ranks from rank 0 on with pp=1, but colocated encoders own all of the LLM's ranks; use num_ranks: 4",
        ),
        (("colocated", {"num_ranks": 4, "pp": 2}, {"num_ranks": 4}), "pp=2, but colocated .* pp: 1"),
        (
            ("monolithic", {"num_ranks": 4}, {"num_ranks": 4, "pp": 2}),
            "the ranks of the LLM's first stage; use num_ranks: 2",
        ),
        (("monolithic", {"num_ranks": 4}, {"num_ranks": 4, "tp": 2}), "vision: tp=1, but a monolithic .* use tp: 2"),
        (("colocated", {"num_ranks": 4}, {"num_ranks": 4, "rank_offset": 4}), "llm owns rank 4, but there are only 4"),
        (
            ("colocated", {"num_ranks": 4}, {"num_ranks": 4, "layers": (2, 2)}),
            r"layers is \[2, 2\], but pp=1 makes 1 stage;",
        ),
    ],
)
def test_grids_that_do_not_fit_the_placement_are_refused_with_those_that_would(arguments, complaint):
    with pytest.raises(UserError, match=complaint):
        shared(*arguments)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"schedule": "dualpipe"}, "schedule is 'dualpipe'; it must be one of gpipe, interleaved_1f1b, 1f1b"),
        ({"num_chunks": 2}, "num_chunks=2 with 1f1b; use num_chunks: 1 or schedule: interleaved_1f1b"),
        ({"schedule": "interleaved_1f1b"}, "num_chunks=1 and llm pp=4 interleaves nothing"),
        ({"schedule": "interleaved_1f1b", "num_chunks": 2, "num_microbatches": 6}, "there are 6; use a multiple of 4"),
        ({"num_microbatches": 0}, "0 microbatches; use at least 1"),
    ],
)
def test_numbers_that_do_not_fit_the_schedule_are_refused_with_those_that_would(more, complaint):
    with pytest.raises(UserError, match=complaint):
        shared("colocated", {"num_ranks": 4}, {"num_ranks": 4, "pp": 4}, **more)


def test_a_plan_reads_as_one_line():
    assert str(disjoint(vision_dp=2, llm_pp=3, num_microbatches=2, checkpointing=True)) == (
        "disjoint: vision tp1 pp1 dp2 + llm tp1 pp3 dp1, 2 microbatches, 1f1b, checkpointing"
    )


@given(pp=st.integers(1, 12), more=st.integers(0, 40))
def test_layers_are_split_in_order_into_stages_that_differ_by_one_at_most(pp, more):
    stages = split_layers(pp + more, pp)
    assert [layer for stage in stages for layer in stage] == list(range(pp + more))
    lengths = [len(stage) for stage in stages]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_layers_are_split_as_the_plan_says_and_else_evenly():
    grids = {"num_ranks": 4, "pp": 2}
    uneven = shared("colocated", {"num_ranks": 4}, grids | {"layers": (5, 1)})
    assert uneven.layers_of("llm", 6) == [range(5), range(5, 6)]
    assert uneven.layers_of("vision", 3) == [range(3)]
    assert "llm tp1 pp2 dp2 (layers 5+1)" in str(uneven)
    with pytest.raises(UserError, match=r"layers \[5, 1\] are 6 together, the model has 7"):
        uneven.layers_of("llm", 7)
    chunked = shared("colocated", {"num_ranks": 4}, grids, schedule="interleaved_1f1b", num_chunks=2)
    assert [len(part) for part in chunked.layers_of("llm", 6)] == [2, 2, 1, 1]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UserError, match="3 layers cannot be split into 4 pipeline stages"):
        split_layers(3, 4)
