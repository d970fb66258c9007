"""Plans in other trainers' words: what their flags take is priced as any system of the comparison is."""

import re
from dataclasses import replace

import numpy as np
import pytest

from dflop.balance import LPT, RANDOM
from dflop.base import UserError
from dflop.comparison import EmittedPlans, price_baselines
from dflop.comparison.compare import scheduled_by
from dflop.comparison.systems import fsdp_balanced, megatron
from dflop.config import load_config
from dflop.plan import Grid, Plan
from dflop.plan.layout_key import LayoutKey
from dflop.schedule import GlobalBatches
from dflop.search import pricer_of
from dflop.search.emit import emit

APART = Plan(
    placement="disjoint",
    grids=(Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=3, rank_offset=1, pp=3)),
    num_microbatches=4,
)
TWO_REPLICAS = replace(
    APART,
    grids=(Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=2, rank_offset=2)),
    num_microbatches=2,
)
WHOLE = Plan(
    placement="monolithic",
    grids=tuple(Grid(module=name, num_ranks=4, sharding="parameters") for name in ("vision", "llm")),
    num_microbatches=2,
)
PIPELINE = Plan(
    placement="monolithic",
    grids=(Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=4, pp=2)),
    num_microbatches=4,
)
STEP = r"([\d.e-]+) s"


def make_config(memory_gib: float = 64.0, **model):
    return load_config(
        {
            "model": model,
            "cluster": {"devices_per_node": 4, "memory_gib": memory_gib},
            "train": {"global_batch_size": 16},
            "plan": {"search_batches": 3},
        }
    )


@pytest.fixture(scope="module")
def samples(draw_samples):
    return draw_samples(96, seed=3)


@pytest.fixture(scope="module")
def plans_of(costs, tiny_spec, samples):
    return lambda config, costs=costs: EmittedPlans(config, tiny_spec, costs, samples)


def text_of(plans: EmittedPlans, framework: str, plan: Plan, others=()) -> str:
    return plans.text(framework, plans.pricer(plan, LPT).candidate(), others)


def prices_in(text: str) -> list[str]:
    """The comment lines between the flags and what they cannot express."""
    lines = text.split("\n\n")[1].splitlines()
    assert lines[0].startswith("# Predicted step: ")
    return [line.removeprefix("# ") for line in lines]


@pytest.mark.parametrize("plan", [APART, TWO_REPLICAS], ids=str)
@pytest.mark.parametrize("framework", ["megatron", "automodel", "torchtitan"])
def test_the_price_of_flags_is_what_the_comparison_gives_for_that_plan(
    framework, plan, plans_of, tiny_spec, costs, samples
):
    config = make_config()
    plans = plans_of(config)
    made = emit(framework, plan, tiny_spec, 16).plan
    assert made != plan
    pricer, batches = pricer_of(made, config, tiny_spec, costs), GlobalBatches.of(samples, 16, config.seed)
    at_random = [
        scheduled_by(megatron.SYSTEM, pricer, samples.take(batches[step]), config.seed, step) for step in range(3)
    ]
    by_sampler = plans.pricer(made, fsdp_balanced.SYSTEM.policy).candidate()
    (said,) = prices_in(text_of(plans, framework, plan))
    have_it = (
        rf"Predicted step: {STEP} as planned; as these \w+ have it: {STEP} with random batches, {STEP} with dflop's"
    )
    found = re.fullmatch(f"{have_it} sampler", said)
    expected = (plans.pricer(plan, LPT).mean_step_s(), np.mean([own.step_s for own in at_random]), by_sampler.step_s)
    assert found.groups() == tuple(f"{step_s:.3g}" for step_s in expected)


@pytest.mark.parametrize(
    ("framework", "plan"), [("megatron", PIPELINE), ("ms_swift", PIPELINE), ("accelerate", WHOLE), ("veomni", WHOLE)]
)
def test_where_flags_say_all_only_our_step_and_the_random_one_are_told(framework, plan, plans_of):
    plans = plans_of(make_config())
    (said,) = prices_in(text_of(plans, framework, plan))
    steps = [plans.pricer(plan, policy).mean_step_s() for policy in (LPT, RANDOM)]
    ours, at_random = (f"{step_s:.3g}" for step_s in steps)
    assert re.sub("keys", "flags", said) == (
        f"Predicted step: {ours} s as planned, all of which these flags say; {at_random} s with random batches"
    )


def test_the_usual_way_to_train_costs_in_flags_what_its_baseline_does(plans_of, tiny_spec, costs, samples):
    config = make_config()
    usual = next(own for own in price_baselines(config, tiny_spec, costs, samples) if "Megatron" in own.name)
    (said,) = prices_in(text_of(plans_of(config), "megatron_bridge", usual.plan))
    assert said.endswith(f"all of which these keys say; {usual.step_s:.3g} s with random batches")


def gib_of(plans: EmittedPlans, plan: Plan) -> float:
    return plans.pricer(plan, RANDOM).needed_bytes() / 2**30


def test_flags_that_do_not_fit_are_said_to_with_their_bytes_and_those_that_would(plans_of, tiny_spec):
    some = tuple(replace(grid, recomputed=(4,) if grid.module == "vision" else (0, 0)) for grid in PIPELINE.grids)
    plan = replace(PIPELINE, grids=some, checkpointing=True)  # Megatron-LM has no flag for the encoder's layers
    made, full = (emit("megatron", own, tiny_spec, 16).plan for own in (plan, replace(PIPELINE, checkpointing=True)))
    roomy = plans_of(make_config())
    between = (gib_of(roomy, made) + gib_of(roomy, full)) / 2
    assert gib_of(roomy, full) < between < gib_of(roomy, made)
    plans = plans_of(make_config(memory_gib=between))
    said, way = prices_in(text_of(plans, "megatron", plan))
    assert f"have it: no fit ({gib_of(roomy, made):.3g} GiB a device of {between:.4g}) with random batches, " in said
    # What is named is the fastest of all that fit.
    all_of_it = replace(PIPELINE, checkpointing=True)
    ways = {
        "full recomputing": all_of_it,
        "8 microbatches": replace(plan, num_microbatches=8),
        "full recomputing and 8 microbatches": replace(all_of_it, num_microbatches=8),
    }
    made_of = {words: emit("megatron", own, tiny_spec, 16).plan for words, own in ways.items()}
    steps = {
        words: roomy.pricer(own, RANDOM).mean_step_s()
        for words, own in made_of.items()
        if gib_of(roomy, own) <= between
    }
    best = min(steps, key=steps.__getitem__)
    found = re.fullmatch(rf"With ([^(]*) \((.*)\): {STEP} with random batches, {STEP} with dflop's sampler", way)
    assert (found[1], found[3]) == (best, f"{steps[best]:.3g}")
    assert ("--recompute-method uniform" in found[2]) == ("recomputing" in best)
    assert ("--micro-batch-size 1" in found[2]) == ("microbatches" in best)
    # Another plan is named only where it is faster than what is named here.
    assert len(prices_in(text_of(plans, "megatron", plan, list(ways.values())))) == 2


def test_where_nothing_fits_the_nearest_is_told(plans_of):
    needed_gib = gib_of(plans_of(make_config()), PIPELINE)
    said, way = prices_in(text_of(plans_of(make_config(memory_gib=needed_gib / 100)), "megatron", PIPELINE))
    assert "no fit" in said
    assert re.fullmatch(r"With .*: no fit \(.* GiB a device of .*\) with random batches, no fit .*", way)


def test_another_plan_that_is_faster_with_random_batches_is_named(plans_of):
    plans = plans_of(make_config())
    steps = {plan: plans.pricer(plan, RANDOM).mean_step_s() for plan in (WHOLE, PIPELINE)}
    fast, slow = sorted(steps, key=steps.__getitem__)
    lines = prices_in(text_of(plans, "megatron", slow, [slow, fast]))
    assert lines[1:] == [
        f"With random batches another plan is faster, {fast}: {steps[fast]:.3g} s; `plan.fixed` pins it"
    ]
    assert len(prices_in(text_of(plans, "megatron", fast, [slow, fast]))) == 1


def test_an_encoder_without_costs_as_the_llm_is_divided_has_no_figure(plans_of, costs):
    def with_tp_2(table: dict, factor: float) -> dict:
        return table | {
            (key[0], LayoutKey(2), *key[2:]): factor * value for key, value in table.items() if key[0] == "llm"
        }

    tables = ("times", "parameter_bytes", "activations", "transients")
    divided = replace(costs, **{name: with_tp_2(getattr(costs, name), 0.5) for name in tables})
    vision = Grid(module="vision", num_ranks=2)
    plan = replace(APART, grids=(vision, Grid(module="llm", num_ranks=2, tp=2, rank_offset=2)))
    (said,) = prices_in(text_of(plans_of(make_config(), divided), "megatron", plan))
    assert said.endswith("as these flags have it: not known, for want of costs of vision with tp=2")


def test_a_plan_that_a_framework_cannot_run_gives_way_to_the_fastest_it_can_and_the_price_is_said(plans_of):
    plans = plans_of(make_config())
    slower = replace(WHOLE, num_microbatches=4, checkpointing=True)
    steps = {plan: plans.pricer(plan, LPT).mean_step_s() for plan in (APART, WHOLE, slower)}
    assert steps[WHOLE] < steps[slower]
    text = text_of(plans, "veomni", APART, [APART, slower, WHOLE])
    assert text.startswith(f"# {WHOLE}\n")
    assert f"takes {steps[WHOLE]:.3g} s instead of {steps[APART]:.3g} s" in text
    assert "modules on devices of their own" in text
    assert "instead of" not in text_of(plans, "veomni", WHOLE, [APART])
    with pytest.raises(UserError, match=r"cannot run the plan .* `plan.fixed` can pin"):
        text_of(plans, "accelerate", APART, [APART])


def test_what_the_plan_was_priced_to_train_is_said(plans_of):
    text = text_of(plans_of(make_config(freeze=["vision.encoder"])), "megatron", PIPELINE)
    assert "priced with all parts but vision.encoder trained" in text
    assert "what is trained" not in text_of(plans_of(make_config()), "megatron", PIPELINE)


def test_a_plan_that_shares_long_samples_is_priced_as_planned_and_with_whole_samples(plans_of):
    sharing = replace(WHOLE, grids=(WHOLE.grids[0], replace(WHOLE.grid("llm"), cp=4)))
    plans = plans_of(make_config())
    line = prices_in(text_of(plans, "automodel", sharing))[0]
    planned, at_random, by_sampler = map(float, re.findall(r"([\d.]+) s\b", line))
    assert "as these keys have it, but with whole samples: " in line
    assert planned == pytest.approx(plans.pricer(sharing, LPT).mean_step_s(), rel=0.01)
    assert at_random == pytest.approx(plans.pricer(WHOLE, RANDOM).mean_step_s(), rel=0.01)
    assert by_sampler < at_random
    assert planned < 0.99 * plans.pricer(WHOLE, LPT).mean_step_s()  # shares, and not whole samples, are priced
