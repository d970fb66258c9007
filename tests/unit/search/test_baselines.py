"""What others would run: priced on the same batches, each the best of its kind, and never a failure."""

import numpy as np
import pytest
from spaces import bent_costs, make_config, price_all, uneven_samples

from dflop.balance import BY_LENGTH, LPT, RANDOM
from dflop.comparison import check_pins, price_baselines, todays_layout_note
from dflop.config import PlanConfig
from dflop.costs import Loads, StageKind
from dflop.plan.layout_key import LayoutKey
from dflop.schedule import loads_of
from dflop.search import TODAY, PlanPricer, enumerate_space, plan_of, search_plans
from dflop.search.grouped_batches import GroupedBatches

RULE, MEGATRON, FSDP = "published rule", "monolithic, random batches", "every device the whole model, random batches"
LIKE_LENGTHS, BALANCED = (FSDP.replace("random", how) for how in ("length-grouped", "balanced"))


@pytest.fixture(scope="module")
def price(tiny_spec):
    """Baselines by the beginning of their name."""

    def run(config, costs, samples):
        return {
            next(name for name in (RULE, MEGATRON, FSDP, LIKE_LENGTHS, BALANCED) if own.name.startswith(name)): own
            for own in price_baselines(config, tiny_spec, costs, samples)
        }

    return run


@pytest.mark.parametrize("seed", range(2))
def test_no_plan_of_the_published_rule_is_faster_than_the_search(price, tiny_spec, seed):
    """It chooses from the same space, priced the same way: disjoint, 1f1b, balanced batches."""
    costs, samples = bent_costs(seed), uneven_samples(40, seed)
    config = make_config(4, 8)
    found = search_plans(config, tiny_spec, costs, samples)
    assert found.candidates[0].step_s <= price(config, costs, samples)[RULE].step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_the_monolithic_baseline_is_the_best_there_is_without_balance(price, tiny_spec, seed):
    """The search is no slower than the same plan with balanced batches. That balanced batches are the faster ones is no
    theorem, only what they are for."""
    costs, samples = bent_costs(seed), uneven_samples(40, seed)
    config = make_config(4, 8, placements=["monolithic"], schedules=["1f1b"], shardings=["optimizer"])
    own = price(config, costs, samples)[MEGATRON]
    everything = price_all(config, tiny_spec, costs, samples, RANDOM)
    even = [plan for plan in everything["plan"] if "layers" not in plan]
    assert own.step_s == pytest.approx(dict(everything.select("plan", "step_s").iter_rows())[str(own.plan)], rel=1e-9)
    assert own.step_s == pytest.approx(
        min(step_s for plan, step_s in everything.select("plan", "step_s").iter_rows() if plan in even), rel=1e-9
    )
    batches = GroupedBatches(config, tiny_spec, costs, samples)
    balanced = PlanPricer(own.plan, config, tiny_spec, costs, batches, LPT)
    balanced_s = np.mean([balanced.step_s(batch) for batch in range(len(batches))])
    found = search_plans(make_config(4, 8), tiny_spec, costs, samples)
    assert found.candidates[0].step_s <= balanced_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_the_rule_takes_the_least_of_its_formula_at_mean_shapes(price, tiny_spec, seed):
    """(m + pp_v + pp_l - 1) times the slowest stage of the mean microbatch, written out plan by plan."""
    costs, samples = bent_costs(seed), uneven_samples(40, seed)
    config = make_config(4, 8)
    batches = GroupedBatches(config, tiny_spec, costs, samples)
    within = PlanConfig(placements=["disjoint"], schedules=["1f1b"], shardings=["optimizer"])

    def value(plan) -> float:
        stages_s = []
        for grid in plan.grids:
            sums = [[load.sum() for load in loads_of(grid.module, shapes)] for shapes in batches.shapes]
            mean = np.mean(sums, axis=0)[:, None] / (grid.dp * plan.num_microbatches)
            whole = StageKind.whole(grid.module, LayoutKey(grid.tp), 4, num_recomputed=4 if plan.checkpointing else 0)
            whole_s = sum(costs.stage_time(whole, Loads(*mean)))
            stages_s.append(whole_s.item() / grid.pp)
        return (plan.num_microbatches + sum(grid.pp for grid in plan.grids) - 1) * max(stages_s)

    rows = enumerate_space(config, tiny_spec, costs.layouts, {}, within)
    least = min(value(plan_of(row, {})) for row in rows.iter_rows(named=True))
    assert value(price(config, costs, samples)[RULE].plan) == pytest.approx(least)


def test_every_device_holds_its_share_of_the_parameters_alone(price, costs, samples):
    """The plan as it is would hold them all, on every device; and gathering them takes a slow network its time."""
    own = price(make_config(4, 8), costs, samples)[FSDP]
    slow = price(make_config(4, 8, intra_node_gbps=1e-3), costs, samples)[FSDP]
    assert {grid.sharding for grid in own.plan.grids} == {"parameters"}
    assert own.plan.grid("llm").dp == own.plan.grid("vision").dp == 4
    size = sum(costs.stage_parameter_bytes(StageKind.whole(module, LayoutKey(), 4)) for module in ("vision", "llm"))
    assert own.memory_bytes > size
    assert slow.step_s >= 2 * size * 3 / 4 / (1e-3 * 1e9 / 8)
    assert slow.step_s > own.step_s
    assert 0 < own.priced.idle < 1


@pytest.mark.parametrize("seed", range(2))
def test_fsdp_is_priced_with_each_way_to_group_a_batch_and_never_beats_the_search(price, tiny_spec, seed):
    costs, samples = bent_costs(seed), uneven_samples(40, seed)
    config = make_config(4, 8)
    priced = price(config, costs, samples)
    found = search_plans(config, tiny_spec, costs, samples)
    batches = GroupedBatches(config, tiny_spec, costs, samples)
    for name, policy in ((FSDP, RANDOM), (LIKE_LENGTHS, BY_LENGTH), (BALANCED, LPT)):
        own = priced[name]
        pricer = PlanPricer(own.plan, config, tiny_spec, costs, batches, policy)
        assert own.step_s == pytest.approx(np.mean([pricer.step_s(batch) for batch in range(len(batches))]))
    assert found.candidates[0].step_s <= priced[BALANCED].step_s * (1 + 1e-9)


def test_a_frozen_module_sends_no_gradients(price, costs, samples):
    """On a network so slow that moving is all there is: parameters for each pass (of the last unit once), gradients."""
    sizes = {
        module: costs.stage_parameter_bytes(StageKind.whole(module, LayoutKey(), 4)) for module in ("vision", "llm")
    }
    last = {module: costs.parameter_bytes[module, LayoutKey(), "last"] for module in sizes}
    for freeze, in_all in (
        ([], 3 * sizes["vision"] - last["vision"] + 3 * sizes["llm"] - last["llm"]),
        (["vision"], sizes["vision"] + 3 * sizes["llm"] - last["llm"]),
        (["llm"], 3 * sizes["vision"] - last["vision"] + 2 * sizes["llm"] - last["llm"]),
    ):
        own = price(make_config(4, 8, intra_node_gbps=1e-4, freeze=freeze), costs, samples)[FSDP]
        assert own.step_s == pytest.approx(own.plan.num_microbatches * in_all * 3 / 4 / (1e-4 * 1e9 / 8), rel=1e-3)
        assert own.memory_bytes > 0


def test_where_nothing_fits_baselines_say_so(price, costs, samples):
    for own in price(make_config(4, 8, memory_gib=1e-3), costs, samples).values():
        assert own.plan is None
        assert own.step_s == np.inf


def test_a_baseline_that_fits_stays_within_memory(price, costs, samples):
    roomy = price(make_config(4, 8), costs, samples)
    limit = 0.8 * roomy[MEGATRON].memory_bytes
    tight = price(make_config(4, 8, memory_gib=limit / 2**30), costs, samples)
    assert all(own.memory_bytes <= limit for own in tight.values() if own.plan)
    assert tight[MEGATRON].plan
    assert tight[MEGATRON].step_s > roomy[MEGATRON].step_s


@pytest.fixture
def price_today(tiny_spec, costs, samples):
    """What is said of a layout of today's; of a batch of eight on four devices."""

    def run(today: dict, **cluster):
        config = make_config(4, 8, today=today, **cluster)
        first, *others = price_baselines(config, tiny_spec, costs, samples)
        assert first.name == TODAY
        assert TODAY not in [own.name for own in others]
        return first

    return run


def test_todays_layout_is_priced_as_it_stands_with_random_batches(price_today, tiny_spec, costs, samples):
    today = {"placement": "disjoint", "vision": {"dp": 2}, "llm": {"pp": 2, "dp": 1}, "num_microbatches": 4}
    own = price_today(today | {"schedule": "gpipe", "checkpointing": True})
    assert str(own.plan) == "disjoint: vision tp1 pp1 dp2 + llm tp1 pp2 dp1, 4 microbatches, gpipe, checkpointing"
    config = make_config(4, 8)
    batches = GroupedBatches(config, tiny_spec, costs, samples)
    pricer = PlanPricer(own.plan, config, tiny_spec, costs, batches, RANDOM)
    assert own.priced.steps_s == pytest.approx([pricer.step_s(batch) for batch in range(len(batches))], rel=1e-9)


def test_what_todays_layout_leaves_open_is_the_fastest_of_the_usual_kind(price_today, price, costs, samples):
    assert price_today({"num_microbatches": None}).plan == price(make_config(4, 8), costs, samples)[MEGATRON].plan
    sharded = price_today({"llm": {"pp": 1, "sharding": "parameters"}}).plan
    assert (sharded.placement, sharded.grid("llm").sharding) == ("monolithic", "parameters")


def test_todays_layout_that_does_not_fit_is_said_to_with_its_bytes(price_today):
    layout = {"placement": "disjoint", "vision": {"dp": 2}, "llm": {"dp": 2}, "num_microbatches": 2}
    needed_bytes = price_today(layout | {"checkpointing": False}).memory_bytes
    little = price_today(layout | {"checkpointing": False}, memory_gib=0.9 * needed_bytes / 2**30)
    assert little.plan is None
    assert f"llm tp1 pp1 dp2, 2 microbatches, 1f1b needs {needed_bytes / 2**30:.3g} GiB" in little.why_not
    assert f"({needed_bytes:,.0f} bytes)" in little.why_not


@pytest.mark.parametrize(
    ("today", "message"),
    [
        ({"llm": {"tp": 1, "pp": 1, "dp": 2}}, "tp 1 x pp 1 x dp 2 = 2 devices, and `cluster` has 4"),
        ({"llm": {"tp": 1, "pp": 1, "dp": 8}}, "tp 1 x pp 1 x dp 8 = 8 devices, and `cluster` has 4"),
        ({"llm": {"pp": 1, "dp": 2}}, "with `plan.today` (llm pp=1, llm dp=2): "),
        ({"llm": {"tp": 4}}, "`plan.today.llm.tp` is 4: "),
    ],
)
def test_todays_layout_for_other_devices_is_noted_early_and_left_out(tiny_spec, costs, today, message):
    config = make_config(4, 8, today=today)
    note = todays_layout_note(config, tiny_spec, costs.layouts)
    assert message in note
    assert note.endswith(". Today's layout is left out of the comparison")
    assert check_pins(config, tiny_spec) == note  # without costs
    assert todays_layout_note(make_config(4, 8, today={"llm": {"dp": 4}}), tiny_spec, costs.layouts) is None


def test_pins_do_not_bind_baselines_and_few_samples_do_not_fail_them(price, costs, samples):
    pinned = price(make_config(4, 8, fixed={"num_microbatches": 5}), costs, samples)
    assert pinned == price(make_config(4, 8), costs, samples)
    few = price(make_config(4, 2), costs, samples)
    assert few[FSDP].plan is None
    assert few[MEGATRON].plan.num_buckets <= 2
