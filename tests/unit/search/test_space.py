"""The space holds every layout that uses all devices once, and no other; pins leave what agrees with them."""

import pytest
from encoders import spec_with
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import ALL_PLACEMENTS, ALL_SCHEDULES, make_config

from dflop.base import UserError
from dflop.config import PlanConfig
from dflop.plan.layout_key import LayoutKey
from dflop.search import check_fixed, enumerate_space, plan_of

LAYOUTS = {module: [LayoutKey(1), LayoutKey(2)] for module in ("vision", "llm")}
SPLITS = {(LayoutKey(1), 2): (3, 1), (LayoutKey(2), 2): (1, 3)}


def plans_of(config, spec, layouts=LAYOUTS, splits=SPLITS, within=None):
    return [
        plan_of(row, splits) for row in enumerate_space(config, spec, layouts, splits, within).iter_rows(named=True)
    ]


@settings(max_examples=20)
@given(devices=st.integers(2, 9), batch_size=st.integers(4, 20))
def test_every_plan_uses_all_devices_and_fills_every_bucket(tiny_spec, devices, batch_size):
    plans = plans_of(make_config(devices, batch_size), tiny_spec)
    assert len(set(map(str, plans))) == len(plans)
    for plan in plans:
        assert plan.world_size == devices
        assert plan.num_buckets <= batch_size
        for grid in plan.grids:
            assert plan.num_stages(grid.module) <= tiny_spec.module(grid.module).num_layers
    disjoint = {
        (plan.grid("vision").dp, plan.grid("llm").pp, plan.grid("llm").dp)
        for plan in plans
        if plan.placement == "disjoint" and plan.grid("vision").pp == plan.grid("vision").tp == plan.grid("llm").tp == 1
    }
    assert disjoint == {
        (vision_dp, pp, (devices - vision_dp) // pp)
        for vision_dp in range(1, devices)
        for pp in range(1, 5)
        if (devices - vision_dp) % pp == 0 and batch_size >= (devices - vision_dp) // pp
    }
    counts = {plan.num_microbatches for plan in plans if plan.grid("llm").dp == 1}
    assert counts == {count for count in (1, 2, 3, 4, 6, 8, 12, 16) if count <= batch_size}


def test_all_placements_schedules_splits_and_sizes_are_in_it(tiny_spec):
    plans = plans_of(make_config(8, 8), tiny_spec)
    assert {plan.placement for plan in plans} == set(ALL_PLACEMENTS)
    assert {plan.schedule for plan in plans} == set(ALL_SCHEDULES)
    assert {plan.grid("llm").layers for plan in plans} == {(), (3, 1), (1, 3)}
    assert {plan.grid("vision").pp for plan in plans} == {1, 2, 4}
    assert {(plan.grid("vision").tp, plan.grid("llm").tp) for plan in plans} == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_no_tensor_parallel_group_lies_on_two_nodes(tiny_spec):
    for plan in plans_of(make_config(9, 8, num_nodes=3), tiny_spec):
        assert plan.grid("llm").tp == plan.grid("vision").tp == 1
    for plan in plans_of(make_config(8, 8, num_nodes=2), tiny_spec):
        for grid in plan.grids:
            firsts = range(grid.rank_offset, grid.rank_offset + grid.num_ranks, grid.tp)
            assert all(first // 4 == (first + grid.tp - 1) // 4 for first in firsts), plan


def test_one_microbatch_or_one_stage_has_one_schedule(tiny_spec):
    plans = plans_of(make_config(4, 8), tiny_spec)
    assert {plan.schedule for plan in plans if plan.grid("llm").pp == 1 or plan.num_microbatches == 1} == {"1f1b"}


@pytest.mark.parametrize(
    ("fixed", "holds"),
    [
        ({"placement": "colocated"}, lambda plan: plan.placement == "colocated"),
        *(
            ({module: {size: 2}}, lambda plan, module=module, size=size: getattr(plan.grid(module), size) == 2)
            for module in ("vision", "llm")
            for size in ("tp", "pp", "dp")
        ),
        ({"num_microbatches": 5}, lambda plan: plan.num_microbatches == 5),
        ({"checkpointing": True}, lambda plan: True),
        ({"schedule": "gpipe"}, lambda plan: plan.schedule == "gpipe"),
    ],
)
def test_a_pin_leaves_exactly_the_plans_that_agree_with_it(tiny_spec, fixed, holds):
    left = plans_of(make_config(8, 16, fixed=fixed), tiny_spec)
    assert all(holds(plan) for plan in left)
    if "num_microbatches" in fixed:
        return  # 5 is not among the counts that are searched
    everything = [plan for plan in plans_of(make_config(8, 16), tiny_spec) if holds(plan)]
    assert {str(plan) for plan in everything} <= {str(plan) for plan in left}
    if "schedule" not in fixed:  # with one microbatch all schedules are the same; a pinned one is kept
        assert len(everything) == len(left) > 1


def test_a_microbatch_count_that_fits_one_layout_alone_leaves_that_one(tiny_spec):
    """Eight samples fill eight microbatches only where the LLM has one replica."""
    plans = plans_of(make_config(4, 8, fixed={"num_microbatches": 8}), tiny_spec)
    assert {plan.grid("llm").dp for plan in plans} == {1}


def test_each_of_several_encoders_has_devices_of_its_own(tiny_spec):
    spec = spec_with(tiny_spec, ("vision", "audio"))
    config = make_config(6, 8, num_nodes=3, schedules=["1f1b"], fixed={"num_microbatches": 1, "checkpointing": False})
    plans = plans_of(config, spec, {name: [LayoutKey(1), LayoutKey(2)] for name in ("vision", "audio", "llm")})
    assert len(set(map(str, plans))) == len(plans)
    apart = {tuple(grid.num_ranks for grid in plan.grids) for plan in plans if plan.placement == "disjoint"}
    assert apart == {(vision, audio, 6 - vision - audio) for vision in range(1, 5) for audio in range(1, 6 - vision)}
    for plan in plans:
        for grid in plan.grids:
            firsts = range(grid.rank_offset, grid.rank_offset + grid.num_ranks, grid.tp)
            assert {first // 2 for first in firsts} == {(first + grid.tp - 1) // 2 for first in firsts}, plan
    sharing = {plan.grids[:2] for plan in plans if plan.placement == "colocated"}
    assert {(vision.tp, audio.tp) for vision, audio in sharing} == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_on_many_devices_several_encoders_get_less_choice_and_a_pinned_one_gets_all(tiny_spec):
    spec = spec_with(tiny_spec, ("vision", "audio"))
    limits = {"schedules": ["1f1b"], "shardings": ["optimizer", "parameters"], "placements": ["disjoint", "colocated"]}
    free = {"num_microbatches": 1, "checkpointing": False}

    def plans(**modules):
        config = make_config(24, 48, fixed=free | modules, **limits)
        return [
            plan.grids for plan in plans_of(config, spec, {name: [LayoutKey()] for name in ("vision", "audio", "llm")})
        ]

    unpinned = plans()
    few = {1, 2, 3, 4, 6, 8, 12, 16, 24}
    assert {grid.num_ranks for vision, audio, _ in unpinned for grid in (vision, audio)} == few
    assert {grid.pp for vision, audio, _ in unpinned for grid in (vision, audio)} == {1}
    assert all(one.sharding == other.sharding for one, other, _ in unpinned if min(one.dp, other.dp) > 1)
    assert {one.sharding for one, _, _ in unpinned} == {"optimizer", "parameters"}
    pinned = plans(vision={"pp": 2})
    assert {vision.num_ranks for vision, _, _ in pinned} == set(range(2, 23, 2))
    assert {(vision.sharding, audio.sharding) for vision, audio, _ in pinned} == {
        ("optimizer", "optimizer"),
        ("optimizer", "parameters"),
    }


def test_without_encoders_all_placements_are_one(tiny_spec):
    rows = enumerate_space(make_config(4, 8), spec_with(tiny_spec, ()), {"llm": [LayoutKey(1), LayoutKey(2)]}, {})
    assert rows["placement"].n_unique() == 1
    assert rows.columns[:4] == ["placement", "llm_tp", "llm_pp", "llm_dp"]
    assert {plan_of(row, {}).world_size for row in rows.iter_rows(named=True)} == {4}


def test_a_pin_of_a_module_that_the_model_does_not_have_names_those_it_has(tiny_spec):
    with pytest.raises(
        UserError, match=r"`plan\.fixed\.vison` is of no module of tiny; did you mean `plan.fixed.vision`"
    ):
        plans_of(make_config(4, 8, fixed={"vison": {"dp": 2}}), tiny_spec)
    with pytest.raises(UserError, match=r"`plan\.fixed\.audio` is of no module of tiny; it has vision, llm"):
        plans_of(make_config(4, 8, fixed={"audio": {"dp": 2}}), tiny_spec)


def test_other_limits_replace_those_of_the_config(tiny_spec):
    within = PlanConfig(placements=["monolithic"], schedules=["1f1b"])
    plans = plans_of(make_config(4, 8, fixed={"placement": "disjoint"}), tiny_spec, within=within)
    assert {(plan.placement, plan.schedule) for plan in plans} == {("monolithic", "1f1b")}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"fixed": {"llm": {"dp": 2}, "num_microbatches": 8}}, "(llm dp=2, num_microbatches=8)"),
        (
            {"fixed": {"vision": {"tp": 1, "pp": 1, "dp": 1}, "llm": {"pp": 2}, "placement": "disjoint"}},
            "vision dp=1, llm pp=2",
        ),
        ({"fixed": {"vision": {"pp": 3}}}, "tp vision 1/2, llm 1/2"),
        ({"fixed": {"llm": {"pp": 1}, "schedule": "interleaved_1f1b"}}, "schedule=interleaved_1f1b"),
        ({"batch_size": 2, "fixed": {"llm": {"dp": 4}}}, "2 samples a batch"),
    ],
)
def test_pins_that_leave_no_plan_are_told_back(tiny_spec, config, complaint):
    with pytest.raises(UserError) as caught:
        plans_of(make_config(**config), tiny_spec)
    message = str(caught.value)
    assert "no plan uses all 4 devices of `cluster` with `plan.fixed`" in message
    assert complaint in message
    assert "; loosen `plan.fixed`: " in message
    assert "\n" not in message


APART, TOGETHER = {"placement": "disjoint"}, {"placement": "monolithic"}


@pytest.mark.parametrize(
    ("pins", "complaint"),
    [
        ({"llm": {"tp": 4}}, r"`plan.fixed.llm.tp` is 4: tp=4 does not divide .* use one of 1, 2$"),
        ({"vision": {"tp": 4}}, r"`plan.fixed.vision.tp` is 4: .* costs at tp 1, 2 .* add 4 to `costs.tp_sizes`"),
        ({"vision": {"tp": 8}}, r"`plan.fixed.vision.tp` is 8: tp=8 does not divide "),
        (TOGETHER | {"llm": {"tp": 1, "pp": 1, "dp": 2}}, r"llm` is tp 1 x pp 1 x dp 2 = 2 devices.* make it 4$"),
        (TOGETHER | {"llm": {"pp": 3}}, r"llm` is pp 3 = 3 devices.* make it a divisor of 4$"),
        (
            APART | {module: {"tp": 1, "pp": 1, "dp": 1} for module in ("vision", "llm")},
            r"`plan.fixed` is vision 1 \+ llm 1 = 2 devices, and `cluster` has 4 \(1 x 4\); make it 4$",
        ),
    ],
)
def test_a_size_that_no_plan_has_is_named_with_those_that_plans_have(tiny_spec, pins, complaint):
    with pytest.raises(UserError, match=complaint):
        plans_of(make_config(fixed=pins), tiny_spec)


def test_a_pipeline_has_no_more_stages_than_layers_and_a_group_of_tp_does_not_span_nodes(tiny_spec):
    with pytest.raises(UserError, match=r"`plan.fixed.llm.pp` is 5: .* use at most 4$"):
        plans_of(make_config(8, fixed={"llm": {"pp": 5}}), tiny_spec)
    with pytest.raises(UserError, match=r"`plan.fixed.llm.tp` is 2: .* of 1 devices .*; use 1$"):
        plans_of(make_config(4, num_nodes=4, fixed={"llm": {"tp": 2}}), tiny_spec)


def test_groups_of_replicas_that_no_plan_has_are_refused_without_costs(tiny_spec):
    config = make_config(4, fixed={"llm": {"dp": 2, "cp": 4}})
    with pytest.raises(UserError, match=r"groups of 4 LLM replicas .*`plan.fixed.llm.cp`.* use a smaller one"):
        check_fixed(config, tiny_spec, LAYOUTS)
    check_fixed(make_config(4, fixed={"llm": {"dp": 2, "cp": 2}}), tiny_spec, LAYOUTS)


def test_the_pins_to_blame_are_named_with_the_plans_that_there_are_without_them(tiny_spec):
    """Seven microbatches of eight samples on two replicas are too many; with either number alone there is a way."""
    pins = {"placement": "disjoint", "llm": {"dp": 2}, "num_microbatches": 7}
    with pytest.raises(UserError, match=r"without llm dp=2 there are \d+ plans, without num_microbatches=7 there are"):
        plans_of(make_config(fixed=pins), tiny_spec)
    remaining = plans_of(make_config(fixed=pins | {"num_microbatches": None}), tiny_spec)
    with pytest.raises(UserError, match=f"without num_microbatches=7 there are {len(remaining)} plans"):
        plans_of(make_config(fixed=pins), tiny_spec)


def test_pins_of_which_each_alone_leaves_nothing_are_blamed_together(tiny_spec):
    pins = {"vision": {"pp": 3}, "llm": {"pp": 1}, "schedule": "interleaved_1f1b"}
    with pytest.raises(UserError, match=r"more than one pin is to blame$"):
        plans_of(make_config(8, fixed=pins), tiny_spec)


def test_a_cluster_that_no_layout_fills_says_what_was_tried(tiny_spec):
    """Seven devices and three samples: one replica of seven stages has too few layers, seven have too few samples."""
    with pytest.raises(UserError, match=r"4 LLM layers, 3 samples a batch; raise `train\.global_batch_size`"):
        plans_of(make_config(7, 3, placements=["monolithic"]), tiny_spec)
