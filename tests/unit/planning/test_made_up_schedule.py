"""A schedule that the package does not know: in the table, it is ordered, checked, simulated and searched like any."""

import dataclasses

import numpy as np
import pytest
from spaces import make_config

from dflop.pipeline import (
    SCHEDULES,
    Bridges,
    Grid,
    Plan,
    Schedule,
    StageTimes,
    check_program,
    compile_plan,
    make_program,
    simulate,
)


class Eager(Schedule):
    """Like 1F1B with one forward more in flight on every stage, and weight gradients that wait for one backward."""

    name = "eager"
    splits_backward = True

    def ahead(self, stage, pp, num_microbatches, num_chunks):
        return pp - stage

    def weight_delay(self, place):
        return 1


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "eager", Eager())
    return "eager"


def make_plan(schedule: str, num_vision_ranks: int = 2) -> Plan:
    return Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=num_vision_ranks),
            Grid(module="llm", num_ranks=3, pp=3, rank_offset=num_vision_ranks),
        ),
        num_microbatches=6,
        schedule=schedule,
    )


def step_s(plan: Plan) -> float:
    compiled = compile_plan(plan)
    ones = np.ones((compiled.num_nodes, plan.num_microbatches))
    times = StageTimes(
        forward_s=ones,
        backward_s=2 * ones,
        weight_s=ones,
        chain_s=0.5 * ones,
        bridges=Bridges.none(),
        sync_s=np.zeros(compiled.num_nodes),
    )
    return simulate(compiled, times).step_s


def test_it_is_ordered_checked_and_simulated(eager):
    plan = make_plan(eager)
    check_program(plan, make_program(plan))
    assert "eager" in str(plan)
    # One forward more in flight hides the transfers that 1F1B waits for.
    assert step_s(plan) < step_s(make_plan("1f1b"))


def test_it_is_searched_over_beside_the_others_and_without_checkpointing(search, eager):
    config = make_config(4, 8, placements=["disjoint", "colocated"], schedules=["1f1b"])
    schedules = ["1f1b", eager]
    found = search(dataclasses.replace(config, plan=dataclasses.replace(config.plan, schedules=schedules)))
    plans = [candidate.plan for candidate in found.candidates]
    assert {plan.schedule for plan in plans} == set(schedules)
    assert not any(plan.checkpointing for plan in plans if plan.schedule == eager)
