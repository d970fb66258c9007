"""Plans in other trainers' words: what their flags take is priced as any system of the comparison is."""

import re
from dataclasses import replace

import numpy as np
import pytest

from dflop.balance import LPT, RANDOM, Policy
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
SAMPLER = fsdp_balanced.SYSTEM.policy
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


def gib_of(plans: EmittedPlans, plan: Plan, policy: Policy = RANDOM) -> float:
    return plans.pricer(plan, policy).needed_bytes() / 2**30


SOME = replace(
    PIPELINE,
    grids=tuple(replace(grid, recomputed=(4,) if grid.module == "vision" else (0, 0)) for grid in PIPELINE.grids),
    checkpointing=True,
)
# What may need less memory than SOME, for which Megatron-LM has no flags: it has none for the encoder's layers.
WAYS = {
    "full recomputing": replace(PIPELINE, checkpointing=True),
    "8 microbatches": replace(SOME, num_microbatches=8),
    "full recomputing and 8 microbatches": replace(PIPELINE, checkpointing=True, num_microbatches=8),
}


def fastest_way(plans: EmittedPlans, spec, policy: Policy, limit_gib: float) -> tuple[str, str]:
    """The fastest of WAYS that fits, as Megatron-LM's flags have it, with its step."""
    made_of = {words: emit("megatron", own, spec, 16).plan for words, own in WAYS.items()}
    fitting = {words: made for words, made in made_of.items() if gib_of(plans, made, policy) <= limit_gib}
    steps = {words: plans.pricer(made, policy).mean_step_s() for words, made in fitting.items()}
    best = min(steps, key=steps.__getitem__)
    return best, f"{steps[best]:.3g}"


def test_flags_that_fit_with_our_sampler_alone_say_so_above_and_name_those_for_random_batches(plans_of, tiny_spec):
    made = emit("megatron", SOME, tiny_spec, 16).plan
    roomy = plans_of(make_config())
    between = (gib_of(roomy, made) + gib_of(roomy, made, SAMPLER)) / 2
    assert gib_of(roomy, made, SAMPLER) < between < gib_of(roomy, made)
    plans = plans_of(make_config(memory_gib=between))
    text = text_of(plans, "megatron", SOME)
    assert "# They need dflop's sampler: with random batches they do not fit into memory.\n--tensor-" in text
    said, way = prices_in(text)
    assert f"have it: no fit ({gib_of(roomy, made):.3g} GiB a device of {between:.4g}) with random batches, " in said
    found = re.fullmatch(rf"With ([^(]*) \((.*)\): {STEP} with random batches, {STEP} with dflop's sampler", way)
    best, step = fastest_way(roomy, tiny_spec, RANDOM, between)
    assert (found[1], found[3]) == (best, step)
    assert ("--recompute-method uniform" in found[2]) == ("recomputing" in best)
    assert ("--micro-batch-size 1" in found[2]) == ("microbatches" in best)
    # Another plan is named only where it is faster than what is named here.
    assert len(prices_in(text_of(plans, "megatron", SOME, list(WAYS.values())))) == 2


def test_in_place_of_flags_that_do_not_fit_the_fastest_that_do_are_printed(plans_of, tiny_spec):
    made, full = (emit("megatron", own, tiny_spec, 16).plan for own in (SOME, WAYS["full recomputing"]))
    roomy = plans_of(make_config())
    between = (gib_of(roomy, made, SAMPLER) + gib_of(roomy, full, SAMPLER)) / 2
    assert gib_of(roomy, full, SAMPLER) < between < gib_of(roomy, made, SAMPLER)
    text = text_of(plans_of(make_config(memory_gib=between)), "megatron", SOME)
    best, step = fastest_way(roomy, tiny_spec, SAMPLER, between)
    assert f"# They are not the plan's own, which do not fit into memory; these do, with {best}.\n" in text
    flags = text.split("\n\n")[0]
    assert ("--recompute-method uniform" in flags) == ("recomputing" in best)
    assert ("--micro-batch-size 1" in flags) == ("microbatches" in best)
    said, own, *_ = prices_in(text)
    assert said.endswith(f", {step} s with dflop's sampler")
    needed = f"no fit ({gib_of(roomy, made, SAMPLER):.3g} GiB a device of {between:.4g})"
    assert re.fullmatch(rf"With the plan's own flags \(.*\): no fit .*, {re.escape(needed)} with dflop's sampler", own)


def test_where_nothing_fits_flags_say_so_and_the_nearest_is_told(plans_of):
    needed_gib = gib_of(plans_of(make_config()), PIPELINE)
    text = text_of(plans_of(make_config(memory_gib=needed_gib / 100)), "megatron", PIPELINE)
    assert "# They do not fit into memory.\n--tensor-" in text
    said, way = prices_in(text)
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
