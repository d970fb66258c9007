"""Between plans that are priced alike the steps of scheduled batches decide."""

from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np
import pytest
import yaml
from spaces import ALL_SHARDINGS, make_config

from dflop.base import UserError
from dflop.base.commands import COMMANDS
from dflop.config import ScheduleConfig, restrict, with_value
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer
from dflop.search import describe_choice, pricer_of, with_finalists_scheduled
from dflop.search.final_choice import _finalists, _narrower
from dflop.search.levels import with_fewer_recomputed


def scheduled_s(candidate, config, spec, costs, samples) -> float:
    pricer = Pricer(candidate.plan, costs, spec, config.cluster)
    batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
    scheduler = BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="search"), config.seed)
    return float(np.mean([scheduler.schedule(step).step_s for step in (0, 1)]))


@pytest.fixture
def close(search):
    """A search whose five fastest plans are said to be priced within half a percent, the third fastest as the first."""
    found = search(make_config(4, 8))
    least_s = found.candidates[0].step_s
    turned = [*found.candidates[2::-1], *found.candidates[3:5]]
    alike = [replace(own, steps_s=(least_s * (1 + number / 1000),)) for number, own in enumerate(turned)]
    return replace(found, candidates=alike)


def test_of_plans_priced_alike_the_one_that_schedules_best_is_chosen(close, tiny_spec, costs, samples):
    config = make_config(4, 8)
    chosen = with_finalists_scheduled(close, config, tiny_spec, costs, samples)
    finalists = {}
    for own in close.candidates:
        grids = str(own.plan).partition(",")[0].split(" + ")
        finalists.setdefault((own.plan.placement, own.plan.num_microbatches, own.plan.schedule, grids[-1]), own)
    assert 1 < len(finalists) <= len(close.candidates)
    steps_s = {id(own): scheduled_s(own, config, tiny_spec, costs, samples) for own in finalists.values()}
    assert max(steps_s.values()) > min(steps_s.values())
    assert chosen.num_finalists == len(finalists)
    assert steps_s[id(chosen.best)] == min(steps_s.values())
    assert chosen.candidates == close.candidates


def test_why_says_that_the_choice_is_not_the_one_priced_shortest(close, costs):
    chosen = replace(close, chosen=close.candidates[1], num_finalists=3)
    why = yaml.safe_load(describe_choice(chosen, [], make_config(4, 8), costs))["why"]
    assert why.startswith("Within 3 % of the shortest expected step of ")
    ratio = close.candidates[0].step_s / close.candidates[1].step_s
    assert f"By price alone {close.candidates[0].plan} would be chosen, which takes {ratio:.3f}x as long." in why


def test_a_plan_whose_batches_fit_in_no_schedule_gets_more_recomputed_layers(search, tiny_spec, costs, samples):
    found = search(make_config(4, 8))
    fastest = next(own for own in found.candidates if not own.plan.checkpointing)
    config = make_config(4, 8, memory_gib=0.9 * max(fastest.memory_bytes.values()) / 2**30)
    alone = replace(found, candidates=[fastest])
    chosen = with_finalists_scheduled(alone, config, tiny_spec, costs, samples).best
    assert (chosen.plan.checkpointing, chosen.bottleneck) == (True, "memory")
    assert chosen.plan.grid("llm").recomputed != fastest.plan.grid("llm").recomputed
    batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
    for plan, fits in ((fastest.plan, False), (chosen.plan, True)):
        pricer = pricer_of(plan, config, tiny_spec, costs)
        scheduler = BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="search"), config.seed)
        with nullcontext() if fits else pytest.raises(UserError, match="no assignment of the batch"):
            scheduler.check(200)


@pytest.mark.parametrize(("is_pinned", "cp"), [(False, 1), (True, 1), (False, 2)])
def test_the_chosen_plan_recomputes_no_layer_that_its_scheduled_batches_have_room_for(
    search, tiny_spec, costs, samples, is_pinned, cp
):
    found = search(make_config(4, 8, cp_sizes=[cp]))
    plain = next(own for own in found.candidates if not own.plan.checkpointing)
    assert plain.plan.grid("llm").cp == cp
    everything = replace(plain, plan=replace(plain.plan, checkpointing=True), bottleneck="memory")
    most_gib = max(plain.memory_bytes.values()) / 2**30
    pins = {"fixed": {"checkpointing": True}} if is_pinned else {}
    for part in (1.5, 0.99, 0.9):
        memory_gib = part * most_gib
        config = make_config(4, 8, memory_gib=memory_gib, **pins)
        alone = replace(found, candidates=[everything])
        chosen = with_finalists_scheduled(alone, config, tiny_spec, costs, samples)
        if is_pinned:
            assert chosen.best is everything
            continue
        assert chosen.candidates == [chosen.best]
        fewer_s, before_s = (scheduled_s(own, config, tiny_spec, costs, samples) for own in (chosen.best, everything))
        assert fewer_s < before_s
        pricer = pricer_of(chosen.best.plan, config, tiny_spec, costs)
        batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
        scheduler = BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="search"), config.seed)
        scheduler.check(200)
        peaks = [pricer.memory_bytes(own.shapes, own.assignment) for own in map(scheduler.schedule, (0, 1))]
        assert chosen.best.memory_bytes == {module: max(own[module] for own in peaks) for module in peaks[0]}
        assert max(chosen.best.memory_bytes.values()) <= memory_gib * 2**30
        if part > 1:
            assert not chosen.best.plan.checkpointing
            assert chosen.best.bottleneck != "memory"
            continue
        trained = config.model.trained.among(tiny_spec.modules)
        fewer = next(with_fewer_recomputed(chosen.best.plan, tiny_spec, trained))
        scheduler = scheduler.priced_by(pricer_of(fewer, config, tiny_spec, costs))
        with pytest.raises(UserError, match="no assignment of the batch"):
            scheduler.check(200, searches=False)


def test_of_plans_that_train_the_llm_alike_another_is_chosen_if_it_is_faster_once_it_recomputes_less(
    search, tiny_spec, costs, samples
):
    config = make_config(4, 8)
    found = search(config)
    groups = _finalists(found, found.candidates[0].step_s)
    alike = next(alike for alike in groups if sum(not own.plan.checkpointing for own in alike) > 1)
    plain = [own for own in alike if not own.plan.checkpointing]
    faster, slower = sorted(plain, key=lambda own: scheduled_s(own, config, tiny_spec, costs, samples))[:2]
    again = replace(faster, plan=replace(faster.plan, checkpointing=True), steps_s=(1.001 * slower.step_s,))
    assert scheduled_s(again, config, tiny_spec, costs, samples) > scheduled_s(
        slower, config, tiny_spec, costs, samples
    )
    both = replace(found, candidates=[slower, again])
    chosen = with_finalists_scheduled(both, config, tiny_spec, costs, samples)
    assert (chosen.best.plan, chosen.num_finalists) == (faster.plan, 1)
    assert slower in chosen.candidates


def test_where_more_recomputed_layers_raise_the_least_price_plans_priced_close_to_it_are_finalists_too(
    search, tiny_spec, costs, samples
):
    fastest = next(own for own in search(make_config(4, 8)).candidates if not own.plan.checkpointing)
    config = make_config(4, 8, memory_gib=0.8 * max(fastest.memory_bytes.values()) / 2**30)
    found = search(config)
    chosen = with_finalists_scheduled(found, config, tiny_spec, costs, samples)
    chosen_s = scheduled_s(chosen.best, config, tiny_spec, costs, samples)
    batches, others = GlobalBatches(len(samples), 8, config.seed), []
    for candidate in found.candidates:
        if candidate.step_s > 1.03 * chosen.best.step_s:
            break
        pricer = pricer_of(candidate.plan, config, tiny_spec, costs)
        scheduler = BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="search"), config.seed)
        with suppress(UserError):
            scheduler.check(200, searches=False)
            others.append(scheduled_s(candidate, config, tiny_spec, costs, samples))
    assert others
    assert chosen_s <= min(others)


def test_a_plan_that_recomputes_is_tried_behind_four_that_do_not(search, tiny_spec, costs, samples):
    config = make_config(4, 8)
    found = search(config)
    plain = [own for own in found.candidates if not own.plan.checkpointing]
    by_steps = sorted(plain[:12], key=lambda own: scheduled_s(own, config, tiny_spec, costs, samples))
    fastest, others = by_steps[0], by_steps[1:]
    again = replace(fastest, plan=replace(fastest.plan, checkpointing=True))
    steps_s = {id(own): scheduled_s(own, config, tiny_spec, costs, samples) for own in (again, *others)}
    assert sum(steps_s[id(own)] < steps_s[id(again)] for own in others) >= 4
    least_s = others[0].step_s
    turned = [replace(own, steps_s=(least_s * (1 + number / 1000),)) for number, own in enumerate([*others, again])]
    chosen = with_finalists_scheduled(replace(found, candidates=turned), config, tiny_spec, costs, samples)
    assert chosen.best.plan == fastest.plan


def test_what_more_memory_brings_is_told_of_the_chosen_plan(search, tiny_spec, costs, samples):
    found = search(make_config(4, 8))
    plain = next(own for own in found.candidates if not own.plan.checkpointing)
    again = replace(plain, plan=replace(plain.plan, checkpointing=True), steps_s=(1.3 * plain.step_s,))
    alone = replace(found, candidates=[again], larger=plain, with_more=1 / 1.3)
    chosen = with_finalists_scheduled(alone, make_config(4, 8), tiny_spec, costs, samples)
    assert chosen.best.plan == plain.plan
    assert (chosen.larger, chosen.with_more) == (None, None)  # the larger one is chosen, and more is not to be had
    tight = make_config(4, 8, memory_gib=0.9 * max(plain.memory_bytes.values()) / 2**30)
    chosen = with_finalists_scheduled(alone, tight, tiny_spec, costs, samples)
    assert plain.step_s < chosen.best.step_s < again.step_s
    assert chosen.larger is plain
    assert chosen.with_more == pytest.approx(plain.step_s / chosen.best.step_s)


@pytest.fixture
def without_room(search):
    """A search that found only the plan that keeps most on a device, and a config with nine tenths of that, and with
    the keys alone that `dflop plan` has."""
    found = search(make_config(4, 8))
    fullest = max(found.candidates, key=lambda own: max(own.memory_bytes.values()))
    memory_gib = 0.9 * max(fullest.memory_bytes.values()) / 2**30
    config = make_config(4, 8, memory_gib=memory_gib, fixed={"checkpointing": False})
    return replace(found, candidates=[fullest]), restrict(config, COMMANDS["plan"].reads)


def test_where_no_finalist_fits_plans_are_searched_that_keep_less(without_room, tiny_spec, costs, samples):
    found, config = without_room
    chosen = with_finalists_scheduled(found, config, tiny_spec, costs, samples).best
    assert chosen.plan not in [own.plan for own in found.candidates]
    pricer = pricer_of(chosen.plan, config, tiny_spec, costs)
    batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
    BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="search"), config.seed).check(200)


def test_searches_in_which_fewer_share_samples_come_before_those_with_less_memory(without_room):
    found, config = without_room
    plan = found.best.plan
    grids = tuple(replace(grid, cp=4) if grid.module == "llm" else grid for grid in plan.grids)
    found = replace(found, candidates=[replace(found.best, plan=replace(plan, grids=grids))])
    config = with_value(config, "plan.cp_sizes", [1, 2, 4])
    narrower = [
        (own.plan.cp_sizes, own.cluster.memory_gib / config.cluster.memory_gib) for own in _narrower(config, found)
    ]
    assert narrower[:2] == [([1, 2], 1.0), ([1], 1.0)]
    assert [sizes for sizes, _ in narrower[2:]] == [[1, 2, 4]] * 3
    assert 1 > narrower[2][1] > narrower[3][1] > narrower[4][1]


def test_where_no_plan_fits_the_cheapest_is_chosen_and_it_is_said(without_room, tiny_spec, costs, samples):
    found, config = without_room
    config = with_value(config, "cluster.memory_gib", config.cluster.memory_gib / 20)
    chosen = with_finalists_scheduled(found, config, tiny_spec, costs, samples)
    assert chosen.best is found.best
    assert "`cluster.memory_gib` is 0.0012" in chosen.trouble


def test_a_plan_that_is_priced_four_percent_longer_is_no_finalist(search, tiny_spec, costs, samples):
    found = search(make_config(4, 8))
    first, *others = found.candidates
    apart = replace(found, candidates=[first, *(replace(own, steps_s=(1.04 * first.step_s,)) for own in others)])
    assert with_finalists_scheduled(apart, make_config(4, 8), tiny_spec, costs, samples) is apart
    assert apart.best is first


@pytest.mark.parametrize("policy", ["lpt", "search"])
@pytest.mark.parametrize("shardings", [ALL_SHARDINGS, ["parameters"]], ids=["any sharding", "parameters shared"])
def test_no_schedule_of_a_batch_is_longer_than_the_step_that_priced_the_plan(
    search, tiny_spec, costs, samples, policy, shardings
):
    config = make_config(4, 24, shardings=shardings)
    for candidate in search(config).candidates:
        pricer = pricer_of(candidate.plan, config, tiny_spec, costs)
        batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
        schedule = ScheduleConfig(policy=policy, search_trials=0)
        scheduler = BatchScheduler(samples, pricer, batches, schedule, config.seed)
        for step, priced_s in enumerate(candidate.steps_s):
            assert scheduler.schedule(step).step_s <= priced_s * (1 + 1e-12), candidate.plan
