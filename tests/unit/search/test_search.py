"""What the search says of what it found, what it refuses, and how plans answer to memory, devices and frozen parts."""

import dataclasses
import re

import pytest
from spaces import LITTLE_GIB, make_config, with_memory, with_quick_tp_2

from dflop.base import UserError
from dflop.config import Config
from dflop.models.loads import Coefficients
from dflop.plan import Plan
from dflop.plan.layout_key import LayoutKey


def needed_gib(found) -> list[float]:
    return [max(own.memory_bytes.values()) / 2**30 for own in found.candidates]


def layout_of(plan: Plan) -> tuple[int, int, int]:
    return plan.grid("vision").dp, plan.grid("llm").pp, plan.grid("llm").dp


def test_candidates_come_fastest_first_and_each_was_priced_on_all_batches(search):
    found = search(make_config(4, 8, search_batches=3))
    steps_s = [own.step_s for own in found.candidates]
    assert steps_s == sorted(steps_s)
    assert {own.num_batches for own in found.candidates} == {3}
    assert found.num_priced == len(found.candidates) <= found.num_plans


def test_a_search_gives_the_same_answer_again(search):
    assert search(make_config()) == search(make_config())


def test_parameters_of_ranks_that_share_modules_are_shared_where_memory_is_scarce(search, costs):
    found = search(make_config(4, 8, memory_gib=LITTLE_GIB), costs=with_quick_tp_2(costs))
    assert found.best is found.candidates[0]
    assert any(grid.gathers and grid.tp > 1 for grid in found.best.plan.grids)


def test_the_best_is_the_fastest_also_where_ranks_share_modules(search, costs):
    alone, shared = search(make_config(4, 8)), search(make_config(4, 8), costs=with_quick_tp_2(costs))
    assert {grid.tp for grid in shared.best.plan.grids} != {1}
    assert shared.best.step_s < alone.best.step_s
    for found in (alone, shared):
        assert found.best is found.candidates[0]


def test_where_the_nearest_needs_more_than_the_card_has_more_devices_are_asked_for(search, costs):
    huge = dataclasses.replace(costs, overhead_bytes=100 * 2**30)
    config = with_memory(make_config(4, 8), 70.0)
    config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, device_model="h100-80g"))
    with pytest.raises(UserError, match=r"needs 100\.1 GiB a device; a h100-80g has 80: use more devices or"):
        search(config, costs=huge)


def test_nothing_that_fits_says_the_nearest_and_the_memory_that_lets_it_run(search):
    config = make_config(4, 8, memory_gib=1e-3)
    with pytest.raises(UserError) as caught:
        search(config)
    message = str(caught.value)
    assert "\n" not in message
    assert "no plan fits into `cluster.memory_gib` = 0.001: of " in message
    said, gib = re.search(r"the nearest, (.*), needs (\S+) GiB a device; raise the memory to that", message).groups()
    found = search(with_memory(config, float(gib)))
    layouts = {str(own.plan).split(", checkpointing")[0] for own in found.candidates}
    assert said.split(", checkpointing")[0] in layouts
    with pytest.raises(UserError):
        search(with_memory(config, float(gib) * 0.998))


def test_an_encoder_that_does_not_fit_is_the_nearest_miss(search, costs):
    activations = dict(costs.activations)
    for checkpointing in (False, True):
        activations["vision", LayoutKey(), "layer", checkpointing] = Coefficients(0.0, (1e9, 0, 0, 0))
    huge = dataclasses.replace(costs, activations=activations)
    with pytest.raises(UserError, match=r"the nearest, disjoint: vision .* needs \S+ GiB a device; raise the memory"):
        search(make_config(4, 8, memory_gib=4), costs=huge)


def test_checkpointing_is_chosen_where_nothing_fits_without_and_only_there(search):
    roomy = search(make_config(3))
    assert not any(own.plan.checkpointing for own in roomy.candidates[:10])
    least = {}
    for pin in (False, True):
        with pytest.raises(UserError) as caught:
            search(make_config(3, memory_gib=1e-3, fixed={"checkpointing": pin}))
        least[pin] = float(re.search(r"needs (\S+) GiB", str(caught.value))[1])
    assert least[True] < 0.9 * least[False]
    tight = search(make_config(3, memory_gib=(least[True] + least[False]) / 2))
    assert all(own.plan.checkpointing for own in tight.candidates)
    assert tight.best.bottleneck == "memory"
    assert tight.best.step_s > roomy.best.step_s


def test_a_plan_that_fits_the_first_batches_alone_is_checkpointed_or_refused(search):
    """A later batch may hold a fuller microbatch."""
    layout = {"placement": "disjoint", "vision": {"dp": 1}, "llm": {"pp": 1, "dp": 1}, "num_microbatches": 4}

    def chosen(search_batches: int, memory_gib: float = 64.0, **pins: bool):
        fixed = layout | pins
        config = make_config(2, 8, fixed=fixed, memory_gib=memory_gib, search_batches=search_batches)
        return search(config)

    first, later = (needed_gib(chosen(count, checkpointing=False))[0] for count in (2, 12))
    assert first < later
    between = (first + later) / 2
    assert not chosen(2, between).best.plan.checkpointing
    assert chosen(12, between).best.plan.checkpointing
    with pytest.raises(UserError, match=r"no plan fits into `cluster\.memory_gib`"):
        chosen(12, between, checkpointing=False)


def test_what_more_memory_would_bring_is_said_and_true(search):
    roomy = search(make_config(4, 8))
    limit_gib = 0.98 * min(needed_gib(roomy)[:3])
    tight = search(make_config(4, 8, memory_gib=limit_gib))
    assert max(needed_gib(tight)) <= limit_gib
    needed_gib_of_larger = max(tight.larger.memory_bytes.values()) / 2**30
    assert needed_gib_of_larger > limit_gib
    assert 1.01 * tight.larger.step_s < tight.candidates[0].step_s
    more = search(make_config(4, 8, memory_gib=1.001 * needed_gib_of_larger))
    assert more.candidates[0].step_s <= tight.larger.step_s
    assert more.candidates[0].step_s < tight.candidates[0].step_s


def test_with_memory_for_all_plans_more_would_bring_nothing(search):
    assert search(make_config(4, 8)).larger is None


def test_more_devices_make_a_shorter_step(search):
    steps_s = [search(make_config(devices, 16)).best.step_s for devices in (2, 4, 6)]
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[-1] < steps_s[0] / 1.5


def test_a_frozen_encoder_needs_fewer_devices(search, costs):
    """With an encoder of eight times the price, so that it takes most of the devices while it is trained."""
    times = {key: 8 * fit if key[0] == "vision" else fit for key, fit in costs.times.items()}
    heavy = dataclasses.replace(costs, times=times)

    def chosen(freeze: list[str]) -> int:
        config = make_config(6, 12, freeze=freeze, placements=["disjoint"])
        return search(config, costs=heavy).best.plan.grid("vision").dp

    assert chosen(["vision"]) < chosen([])


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_modules_that_were_not_measured_are_named_before_anything_is_priced(search, costs, module):
    times = {key: fit for key, fit in costs.times.items() if key[0] != module}
    with pytest.raises(
        UserError,
        match=rf"no measured costs for {module} \(there are: \w+ tp=1\); run `dflop profile-costs --module {module}`",
    ):
        search(make_config(), costs=dataclasses.replace(costs, times=times))


def test_a_wholly_pinned_plan_is_the_one_candidate(search):
    fixed = {"vision": {"tp": 1, "pp": 1, "dp": 1}, "llm": {"tp": 1, "pp": 3, "dp": 1}, "num_microbatches": 5}
    fixed |= {"placement": "disjoint", "checkpointing": True, "schedule": "1f1b"}
    config: Config = make_config(4, 8, fixed=fixed)
    found = search(config, splits_evenly=True)
    (only,) = found.candidates
    assert found.num_plans == 1
    assert layout_of(only.plan) == (1, 3, 1)
    assert str(only.plan).endswith("llm tp1 pp3 dp1, 5 microbatches, 1f1b, checkpointing")
    assert only.bottleneck != "memory"  # nobody left it out to save memory


def test_the_search_tells_how_far_it_is(search):
    said: list[tuple[int, int]] = []
    found = search(make_config(), progress=lambda done, total: said.append((done, total)))
    assert {total for _, total in said} == {found.num_plans}
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert said[-1] == (found.num_plans, found.num_plans)


def test_more_memory_lets_the_chosen_plan_recompute_fewer_layers(search):
    fixed = {"placement": "monolithic", "schedule": "1f1b", "num_microbatches": 2, "llm": {"pp": 1, "dp": 4}}
    roomy = search(make_config(4, 8, fixed=fixed))
    tight = search(make_config(4, 8, fixed=fixed, memory_gib=0.9 * needed_gib(roomy)[0]))
    best, larger = tight.best.plan, tight.larger.plan
    assert best.checkpointing
    assert dataclasses.replace(larger, grids=best.grids, checkpointing=True) == best  # but for what is recomputed
    counts = [sum(sum(plan.recomputed_of(name, 4)) for name in ("vision", "llm")) for plan in (larger, best)]
    assert counts[0] < counts[1]
    assert roomy.with_more is None
    assert tight.with_more == pytest.approx(roomy.best.step_s / tight.best.step_s)  # nothing is recomputed any more
