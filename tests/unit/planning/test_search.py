"""The chosen plan is the one with the shortest scheduled step among all that fit, and pins are obeyed."""

import dataclasses

import numpy as np
import polars as pl
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.config import Config, ScheduleConfig, load_config
from dflop.costs.model import Coefficients
from dflop.errors import UserError
from dflop.pipeline import load_plan
from dflop.planning import Candidate, candidates_frame, describe_choice, enumerate_plans, search_plans
from dflop.planning import search as search_module
from dflop.scheduling import BatchScheduler, GlobalBatches, Pricer

CANDIDATE_COLUMNS = [
    "rank",
    "placement",
    "vision_tp",
    "vision_pp",
    "vision_dp",
    "llm_tp",
    "llm_pp",
    "llm_dp",
    "num_microbatches",
    "checkpointing",
    "schedule",
    "step_s",
    "idle",
    "vision_memory_bytes",
    "llm_memory_bytes",
    "bottleneck",
]


def make_config(devices: int = 3, batch_size: int = 8, fixed: dict | None = None, **cluster) -> Config:
    return load_config(
        {
            "cluster": {"devices_per_node": devices, **cluster},
            "train": {"global_batch_size": batch_size},
            "plan": {"search_batches": 3, "fixed": fixed},
        }
    )


@pytest.fixture(scope="module")
def samples(draw_samples):
    return draw_samples(60, seed=2)


@pytest.fixture(scope="module")
def search(costs, tiny_spec, samples):
    def run(config: Config, **more) -> list[Candidate]:
        return search_plans(config, tiny_spec, costs, samples, **more)

    return run


@pytest.fixture(scope="module")
def price(costs, tiny_spec, samples):
    """A plan's mean step over the first batches, each scheduled anew: what the search promises to minimise."""

    def mean_step_s(config: Config, plan, num_batches: int) -> float:
        pricer = Pricer(plan, costs, tiny_spec, config.cluster, frozen=config.model.freeze)
        batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
        scheduler = BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="lpt"), config.seed)
        return float(np.mean([scheduler.schedule(step).step_s for step in range(num_batches)]))

    return mean_step_s


def layout_of(plan) -> tuple[int, int, int]:
    return plan.grid("vision").dp, plan.grid("llm").pp, plan.grid("llm").dp


def test_the_chosen_plan_has_the_shortest_step_of_all_plans(search, price, tiny_spec):
    config = make_config(devices=4)
    found = search(config)
    everything = {
        str(plan): price(config, plan, 3) for plan in enumerate_plans(config, tiny_spec) if not plan.checkpointing
    }
    assert {str(candidate.plan) for candidate in found} == set(everything)
    assert found[0].step_s == pytest.approx(min(everything.values()))
    for candidate in found[: search_module._FINALISTS]:
        assert candidate.step_s == pytest.approx(everything[str(candidate.plan)])
        assert candidate.num_batches == 3


def test_candidates_come_best_first(search):
    found = search(make_config(devices=3))
    finalists = found[: search_module._FINALISTS]
    assert [candidate.step_s for candidate in finalists] == sorted(candidate.step_s for candidate in finalists)


def test_a_search_gives_the_same_answer_again(search):
    assert search(make_config()) == search(make_config())


@settings(deadline=None, max_examples=30)
@given(devices=st.integers(2, 9), batch_size=st.integers(4, 20))
def test_every_plan_uses_all_devices_once_and_fills_every_bucket(tiny_spec, devices, batch_size):
    plans = list(enumerate_plans(make_config(devices, batch_size), tiny_spec))
    assert len({str(plan) for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.world_size == devices
        assert plan.num_buckets <= batch_size
        assert plan.grid("llm").pp <= tiny_spec.module("llm").num_layers
    reachable = {
        (vision_dp, pp, (devices - vision_dp) // pp)
        for vision_dp in range(1, devices)
        for pp in range(1, 5)
        if (devices - vision_dp) % pp == 0 and batch_size >= (devices - vision_dp) // pp
    }
    assert {layout_of(plan) for plan in plans} == reachable
    counts = {plan.num_microbatches for plan in plans if plan.grid("llm").dp == 1}
    assert counts == {count for count in (1, 2, 3, 4, 6, 8, 12, 16) if count <= batch_size}


@pytest.mark.parametrize(
    ("fixed", "holds"),
    [
        ({"vision": {"dp": 2}}, lambda plan: plan.grid("vision").dp == 2),
        ({"llm": {"pp": 2}}, lambda plan: plan.grid("llm").pp == 2),
        ({"llm": {"dp": 3}}, lambda plan: plan.grid("llm").dp == 3),
        ({"num_microbatches": 5}, lambda plan: plan.num_microbatches == 5),
        ({"checkpointing": True}, lambda plan: plan.checkpointing),
        ({"checkpointing": False}, lambda plan: not plan.checkpointing),
        ({"vision": {"dp": 1}, "llm": {"pp": 3, "dp": 1}, "num_microbatches": 4}, lambda plan: str(plan).endswith(
            "vision tp1 pp1 dp1 + llm tp1 pp3 dp1, 4 microbatches, 1f1b")),
    ],
)  # fmt: skip
def test_what_is_pinned_holds_for_every_candidate_and_the_rest_is_searched(search, fixed, holds):
    found = search(make_config(devices=4, batch_size=16, fixed=fixed))
    assert all(holds(candidate.plan) for candidate in found)
    assert len({str(candidate.plan) for candidate in found}) == len(found)
    if len(fixed) == 1:
        assert len(found) > 1


@pytest.mark.parametrize(
    ("devices", "fixed", "complaint"),
    [
        (4, {"vision": {"dp": 2}, "llm": {"pp": 2, "dp": 1}, "num_microbatches": 9}, "num_microbatches=9"),
        (4, {"vision": {"dp": 1}, "llm": {"pp": 2}}, r"vision dp=1, llm pp=2"),
        (6, {"vision": {"dp": 1}, "llm": {"pp": 5}}, "4 LLM layers"),
    ],
)
def test_pins_that_leave_no_plan_are_told_back(tiny_spec, devices, fixed, complaint):
    config = make_config(devices, batch_size=16, fixed=fixed)
    if fixed and "num_microbatches" in fixed:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=8))
    with pytest.raises(UserError, match=complaint) as caught:
        list(enumerate_plans(config, tiny_spec))
    assert f"no plan uses all {devices} devices" in str(caught.value)


@pytest.mark.parametrize("fixed", [{"llm": {"tp": 2}}, {"vision": {"pp": 2}}])
def test_pins_that_cannot_run_yet_name_the_key(tiny_spec, fixed):
    ((module, pins),) = fixed.items()
    with pytest.raises(UserError, match=rf"`plan\.fixed\.{module}\.{next(iter(pins))}` is 2"):
        list(enumerate_plans(make_config(4, fixed=fixed), tiny_spec))


def test_a_microbatch_count_that_fits_one_layout_alone_leaves_that_one(search):
    """Eight samples fill eight microbatches only where the LLM has one replica."""
    found = search(make_config(devices=4, batch_size=8, fixed={"num_microbatches": 8}))
    assert {candidate.plan.grid("llm").dp for candidate in found} == {1}


def test_nothing_that_fits_names_the_limit_and_the_nearest_miss(search):
    with pytest.raises(UserError) as caught:
        search(make_config(memory_gib=1e-3))
    message = str(caught.value)
    assert "no plan fits into `cluster.memory_gib` = 0.001" in message
    assert "the nearest:" in message
    assert "GiB a device" in message


def test_an_encoder_that_does_not_fit_is_the_nearest_miss(costs, tiny_spec, samples):
    activations = dict(costs.activations)
    for checkpointing in (False, True):
        activations["vision", 1, "layer", checkpointing] = Coefficients(0.0, (1e9, 0, 0, 0))
    with pytest.raises(UserError, match=r"the nearest: disjoint: vision .* needs \S+ GiB a device\. Raise the memory"):
        search_plans(make_config(), tiny_spec, dataclasses.replace(costs, activations=activations), samples)


def test_checkpointing_is_chosen_where_nothing_fits_without_and_only_there(search):
    roomy = search(make_config(devices=3))
    assert not any(candidate.plan.checkpointing for candidate in roomy)
    needed = [max(candidate.memory_bytes.values()) for candidate in roomy]
    checkpointed = search(make_config(devices=3, fixed={"checkpointing": True}))
    least = min(max(candidate.memory_bytes.values()) for candidate in checkpointed)
    assert least < 0.9 * min(needed)
    tight = search(make_config(devices=3, memory_gib=(least + 0.5 * (min(needed) - least)) / 2**30))
    assert all(candidate.plan.checkpointing for candidate in tight)


def test_a_plan_that_fits_the_first_batches_alone_is_checkpointed_or_refused(search):
    """The first look takes two batches; a fuller one comes later."""
    layout = {"vision": {"dp": 1}, "llm": {"pp": 1, "dp": 1}, "num_microbatches": 4}

    def peak(search_batches: int, memory_gib: float = 4.0, **pins: bool) -> float:
        config = make_config(devices=2, fixed=layout | pins, memory_gib=memory_gib)
        config = dataclasses.replace(config, plan=dataclasses.replace(config.plan, search_batches=search_batches))
        (candidate,) = search(config)
        assert candidate.num_batches == search_batches
        return max(candidate.memory_bytes.values()) if not candidate.plan.checkpointing else 0.0

    first, later = peak(2), peak(12)
    assert first < later
    between = (first + later) / 2 / 2**30
    assert peak(2, between) == first
    assert peak(12, between) == 0.0
    with pytest.raises(UserError, match=r"no plan fits into `cluster\.memory_gib`"):
        peak(12, between, checkpointing=False)


def test_every_candidate_fits_into_memory(search):
    roomy = search(make_config(devices=4))
    peaks = sorted(max(candidate.memory_bytes.values()) for candidate in roomy)
    limit_gib = peaks[len(peaks) // 2] / 2**30
    found = search(make_config(devices=4, memory_gib=limit_gib))
    assert found
    assert all(max(candidate.memory_bytes.values()) <= limit_gib * 2**30 for candidate in found)


def test_more_devices_make_a_shorter_step(search):
    best = [search(make_config(devices=devices, batch_size=16))[0].step_s for devices in (2, 4, 6)]
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0] / 1.5


def test_a_frozen_encoder_needs_fewer_devices(costs, tiny_spec, samples):
    """With an encoder of four times the price, so that it takes most of the devices while it is trained."""
    times = {
        key: Coefficients(4 * fit.const, tuple(4 * value for value in fit.per_load)) if key[0] == "vision" else fit
        for key, fit in costs.times.items()
    }
    heavy = dataclasses.replace(costs, times=times)

    def chosen(freeze: list[str]) -> int:
        config = make_config(devices=6, batch_size=12)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=freeze))
        return search_plans(config, tiny_spec, heavy, samples)[0].plan.grid("vision").dp

    assert chosen(["vision"]) < chosen([])


def test_modules_that_were_not_measured_are_named_before_anything_is_priced(costs, tiny_spec, samples):
    times = {key: fit for key, fit in costs.times.items() if key[0] == "llm"}
    with pytest.raises(UserError, match="no measured costs for vision tp=1"):
        search_plans(make_config(), tiny_spec, dataclasses.replace(costs, times=times), samples)


def test_a_batch_larger_than_the_data_is_refused(search):
    with pytest.raises(UserError, match="there are only 60 samples"):
        search(make_config(batch_size=61))


def test_the_table_of_candidates_has_the_promised_columns_and_order(search):
    found = search(make_config())
    frame = candidates_frame(found)
    assert frame.columns[: len(CANDIDATE_COLUMNS)] == CANDIDATE_COLUMNS
    assert frame["rank"].to_list() == list(range(1, len(found) + 1))
    assert frame["step_s"].to_list() == [candidate.step_s for candidate in found]
    assert frame.select(pl.sum_horizontal("vision_dp", pl.col("llm_dp") * pl.col("llm_pp")) == 3).to_series().all()


def test_the_file_of_the_choice_loads_as_the_best_plan_with_its_prediction(search, costs, tmp_path):
    config = make_config()
    found = search(config)
    path = tmp_path / "plan.yaml"
    path.write_text(describe_choice(found, config, dataclasses.replace(costs, source="analytic")))
    assert load_plan(path) == found[0].plan
    described = yaml.safe_load(path.read_text())
    assert described["predicted"]["step_s"] == pytest.approx(found[0].step_s, rel=1e-5)
    assert described["num_candidates"] == len(found)
    assert described["costs"] == "cpu, analytic"
    assert found[0].bottleneck in described["why"]
    assert str(found[1].plan) in described["why"]


def test_the_search_tells_how_far_it_is(search):
    said: list[str] = []
    found = search(make_config(), progress=said.append)
    assert {str(candidate.plan) for candidate in found} <= set(said)
