"""The loop beside training: schedules follow what steps took, and measuring stops where that brings nothing."""

import copy
import dataclasses
import json
from typing import NamedTuple

import numpy as np
import pytest

from dflop.config import ClusterConfig, ScheduleConfig
from dflop.costs import Loads
from dflop.plan import Grid, Plan
from dflop.schedule import (
    REPORT_LAG_STEPS,
    BatchScheduler,
    CorrectionFile,
    CorrectionLoop,
    Corrections,
    GlobalBatches,
    Learner,
    MeasuredStep,
    Pricer,
    StepSchedule,
    read_learned,
)
from dflop.schedule.correction import NUM_LOAD_BINS, NUM_SEGMENT_BINS, bins_of

NUM_SAMPLES, BATCH, LOOKAHEAD = 600, 32, 4


class Beside(NamedTuple):
    """A scheduler that knows the table, and the prices of the device that it schedules for."""

    scheduler: BatchScheduler
    truth: Pricer
    config: ScheduleConfig

    def loop(self, learner: Learner | None = None) -> CorrectionLoop:
        return CorrectionLoop(self.scheduler, self.config, learner)

    def by_oracle(self, steps: range) -> list[StepSchedule]:
        return [self.scheduler.priced_by(self.truth).schedule(step) for step in steps]

    def true_s(self, schedules: list[StepSchedule]) -> float:
        return sum(self.truth.step_s(schedule.shapes, schedule.assignment) for schedule in schedules)


@pytest.fixture(scope="module")
def device(costs, tiny_spec, draw_samples):
    """`device(correction, slow=...)`: a device that is slower than its table in one bin of the LLM, if any."""
    grids = Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=2, pp=2, rank_offset=1)
    plan = Plan(placement="disjoint", grids=grids, num_microbatches=8)
    samples = draw_samples(NUM_SAMPLES, seed=1)
    table = Pricer(
        plan,
        costs,
        tiny_spec,
        ClusterConfig(devices_per_node=4, memory_gib=64.0, intra_node_gbps=100.0, inter_node_gbps=50.0),
    )

    def make(correction="on", *, slow=None, policy="search") -> Beside:
        factors = np.ones((2, NUM_LOAD_BINS, NUM_SEGMENT_BINS))
        if slow is not None:
            factors[:, *slow] = 1.3
        config = ScheduleConfig(policy=policy, search_trials=2000, lookahead_steps=LOOKAHEAD, correction=correction)
        scheduler = BatchScheduler(samples, table, GlobalBatches(NUM_SAMPLES, BATCH, 0), config, 0)
        return Beside(scheduler, table.corrected(Corrections(version=1, factors={"llm": factors})), config)

    return make


@pytest.fixture(scope="module")
def usual_bin(device) -> tuple[int, int]:
    """The LLM's bin with most tokens of a few steps."""
    scheduler, pricer, _ = device()
    met = []
    for step in range(3):
        schedule = scheduler.schedule(step)
        places = bins_of(pricer.loads(schedule.shapes, schedule.assignment)["llm"])
        met += zip(*(place.ravel().tolist() for place in places), strict=True)
    return max(sorted(set(met)), key=lambda place: met.count(place) * 2 ** place[0])


def run(loop: CorrectionLoop, truth: Pricer, num_steps: int, noise: float = 0.02) -> list[StepSchedule]:
    """Steps scheduled ahead as beside training, each measured with noise on the device that `truth` prices."""
    rng = np.random.default_rng(0)
    schedules = []
    for step in range(num_steps):
        schedules.append(loop.schedule(step))
        ended = step - LOOKAHEAD - REPORT_LAG_STEPS + 1
        if ended >= 0 and schedules[ended].measures:
            loop.observe(measured(schedules[ended], truth, noise, rng))
    return schedules


def measured(schedule: StepSchedule, truth: Pricer, noise: float, rng: np.random.Generator) -> MeasuredStep:
    times = truth.stage_times(schedule.shapes, schedule.assignment)
    return MeasuredStep(
        step=schedule.step,
        forward_s=times.forward_s * np.exp(rng.normal(0, noise, times.forward_s.shape)),
        backward_s=times.backward_s * np.exp(rng.normal(0, noise, times.backward_s.shape)),
        overhead=0.001,
    )


def test_with_one_bin_30_percent_slower_steps_come_within_3_percent_of_an_oracles_in_20_steps(device, usual_bin):
    beside, after = device(slow=usual_bin), range(20, 26)
    oracle_s = beside.true_s(beside.by_oracle(after))
    by_table_s = beside.true_s([beside.scheduler.schedule(step) for step in after])
    corrected_s = beside.true_s(run(beside.loop(), beside.truth, 26)[20:])
    assert by_table_s > 1.05 * oracle_s
    assert corrected_s < 1.03 * oracle_s


def test_times_that_are_all_noise_make_schedules_no_worse(device):
    """Each time is drawn with a standard deviation of a half, as on cores that others use, around the table's."""
    beside, after = device(), range(20, 40)
    by_table_s = beside.true_s([beside.scheduler.schedule(step) for step in after])
    corrected_s = beside.true_s(run(beside.loop(), beside.truth, 40, noise=0.5)[20:])
    assert corrected_s < 1.01 * by_table_s


def test_without_drift_the_gate_turns_measuring_off_and_on_again_after_a_while(device):
    beside = device("auto", policy="lpt")
    measures = [schedule.measures for schedule in run(beside.loop(), beside.truth, 160)]
    assert all(measures[:20])
    first_off = measures.index(False)
    assert first_off <= 26
    first_on = measures.index(True, first_off)
    assert not any(measures[first_off:first_on])
    assert sum(measures) < 0.5 * len(measures)


def test_while_corrections_pay_the_gate_keeps_measuring_on(device, usual_bin):
    beside = device("auto", slow=usual_bin)
    assert all(schedule.measures for schedule in run(beside.loop(), beside.truth, 30))


def test_on_measures_always_and_off_never_and_off_schedules_as_the_table_says(device):
    beside = device("on", slow=(11, 9), policy="lpt")
    on = run(beside.loop(), beside.truth, 40)
    assert all(schedule.measures for schedule in on)
    assert on[-1].corrections_version == 40 - LOOKAHEAD - REPORT_LAG_STEPS
    beside = device("off", slow=(11, 9), policy="lpt")
    off = run(beside.loop(), beside.truth, 10)
    assert {(schedule.measures, schedule.corrections_version) for schedule in off} == {(False, 0)}
    for schedule in off:
        np.testing.assert_array_equal(schedule.forward_s, beside.scheduler.schedule(schedule.step).forward_s)


def test_equal_measurements_make_equal_schedules_however_early_they_arrive(device):
    beside = device(slow=(11, 9))
    as_they_came = run(beside.loop(), beside.truth, 14)
    rng, early = np.random.default_rng(0), beside.loop()
    for step in range(14):
        again = early.schedule(step)
        np.testing.assert_array_equal(again.llm_dp_rank, as_they_came[step].llm_dp_rank)
        np.testing.assert_array_equal(again.sample_id, as_they_came[step].sample_id)
        for name in ("step_s", "corrections_version"):
            assert getattr(again, name) == getattr(as_they_came[step], name)
        early.observe(measured(again, beside.truth, 0.02, rng))


def test_a_run_taken_up_again_starts_from_what_was_learned_of_the_same_costs(device, costs, tmp_path):
    beside = device(slow=(11, 9))
    first, file = beside.loop(), CorrectionFile(tmp_path / "learned.json", beside.truth)
    run(first, beside.truth, 14)
    first.learn(14)
    file.write(first.learner)
    schedule = beside.loop(CorrectionFile(tmp_path / "learned.json", beside.truth).read()).schedule(14)
    assert schedule.corrections_version == first.learner.num_steps > 0
    corrected = beside.truth.corrected(first.learner.corrections)
    assert schedule.step_s == pytest.approx(corrected.step_s(schedule.shapes, schedule.assignment))


def test_what_was_learned_of_other_costs_or_by_another_plan_is_void(device, tmp_path):
    pricer = device().truth
    path = tmp_path / "learned.json"
    learner, loads = Learner(), Loads(*np.full((4, 1), 1000.0))
    learner.observe([("llm", loads, np.ones((2, 1)), np.full((2, 1), 1.3))])
    key, fit = next(iter(pricer.costs.times.items()))
    times = {**pricer.costs.times, key: dataclasses.replace(fit, const=2 * fit.const + 1e-6)}
    for changed in (
        {"costs": dataclasses.replace(pricer.costs, times=times)},
        {"plan": dataclasses.replace(pricer.plan, checkpointing=True)},
    ):
        other = copy.copy(pricer)
        vars(other).update(changed)
        CorrectionFile(path, pricer).write(learner)
        assert CorrectionFile(path, pricer).read().bins == learner.bins
        assert CorrectionFile(path, other).read().bins == {}
        assert read_learned(path).bins == {}
        assert CorrectionFile(path, pricer).read().bins == {}


def test_steps_that_were_scheduled_before_a_restart_teach_nothing_and_harm_nothing(device):
    """A restarted service is told of steps of the one before: their schedules are gone."""
    beside = device()
    measured_before = run(beside.loop(), beside.truth, 2)
    restarted = beside.loop()
    for schedule in measured_before:
        restarted.observe(measured(schedule, beside.truth, 0.0, np.random.default_rng(0)))
    assert restarted.schedule(2).corrections_version == 0
    restarted.learn(2)
    assert restarted.learner.num_steps == 0


def test_a_measured_step_comes_back_from_its_line_of_json():
    measured = MeasuredStep(step=3, forward_s=np.ones((2, 4)), backward_s=np.zeros((2, 4)), overhead=0.01)
    line = measured.to_json()
    assert "\n" not in line
    again = MeasuredStep.from_dict(json.loads(line))
    assert (again.step, again.overhead) == (3, 0.01)
    np.testing.assert_array_equal(again.forward_s, measured.forward_s)
    np.testing.assert_array_equal(again.backward_s, measured.backward_s)
