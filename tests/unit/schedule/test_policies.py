"""Policies: each name of the config is one file, and a new file is all that a new policy needs."""

import sys

import numpy as np
import pytest

from dflop.balance import POLICIES, policies
from dflop.base.tables import table_of
from dflop.config import ScheduleConfig, load_config
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer
from dflop.search import search_plans

IN_TURN = """
import numpy as np

from dflop.balance.policies.policy import Policy


class InTurn(Policy):
    name = "in_turn"

    def buckets(self, problem, rng):
        return np.arange(problem.num_samples) % problem.num_buckets


POLICY = InTurn()
"""


def test_the_config_takes_the_name_of_every_policy_and_no_other():
    for name in POLICIES:
        assert load_config({"schedule": {"policy": name}}).schedule.policy == name
    names = ", ".join(sorted(POLICIES))
    with pytest.raises(ValueError, match=f"it must be one of {names}"):
        load_config({"schedule": {"policy": "policy"}})


@pytest.fixture
def in_turn(monkeypatch, tmp_path):
    """A policy in a file of its own."""
    (tmp_path / "in_turn.py").write_text(IN_TURN)
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    found = table_of("dflop.balance.policies", "POLICY")
    assert found.keys() == POLICIES.keys() | {"in_turn"}
    monkeypatch.setitem(POLICIES, "in_turn", found["in_turn"])
    yield found["in_turn"]
    del sys.modules["dflop.balance.policies.in_turn"]


def test_a_new_file_schedules_batches_and_prices_plans(in_turn, costs, tiny_spec, draw_samples):
    layout = {"placement": "disjoint", "vision": {"dp": 1}, "llm": {"dp": 2}, "num_microbatches": 4}
    config = load_config(
        {
            "cluster": {"devices_per_node": 3, "memory_gib": 4.0, "intra_node_gbps": 100.0},
            "train": {"global_batch_size": 16},
            "plan": {"search_batches": 2, "fixed": layout, "shardings": ["optimizer"]},
        }
    )
    samples, batches = draw_samples(60, seed=1), GlobalBatches(60, 16, config.seed)
    found = search_plans(config, tiny_spec, costs, samples, policy=in_turn).best
    shapes, bucket = samples.take(batches[0]), np.arange(16) % 8
    pricer = Pricer(found.plan, costs, tiny_spec, config.cluster)
    assert found.steps_s[0] == pytest.approx(pricer.step_s(shapes, pricer.assign(shapes, *np.divmod(bucket, 4))))

    schedule = BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="in_turn"), config.seed).schedule(0)
    assert (schedule.policy, schedule.status) == ("in_turn", "in_turn")
    assert schedule.step_s == pytest.approx(found.steps_s[0])
    of_sample = dict(zip(schedule.sample_id, 4 * schedule.llm_dp_rank + schedule.microbatch, strict=True))
    assert of_sample == dict(zip(shapes.sample_id, bucket, strict=True))
