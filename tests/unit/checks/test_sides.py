"""Sides take turns: which is whose is what makes their seconds comparable."""

import torch

from dflop.checks.side_by_side import sides
from dflop.checks.side_by_side.sides import Side, timed


def test_each_side_begins_a_round_in_its_turn_and_trains_its_steps_in_order(monkeypatch):
    monkeypatch.setattr(sides.dist, "barrier", lambda: None)
    monkeypatch.setattr(sides.dist, "all_reduce", lambda *_: None)
    trained = []

    def side(name):
        return Side(load=lambda step: step, train=lambda step: trained.append((step, name)))

    seconds, cpu_seconds = timed(
        {name: side(name) for name in "abc"}, 4, torch.device("cpu"), on_the_fly=False, progress=lambda: None
    )
    assert ["".join(name for step, name in trained if step == own) for own in range(4)] == ["abc", "bca", "cab", "abc"]
    assert [step for step, _ in trained] == sorted(step for step, _ in trained)
    assert {len(own) for own in (*seconds.values(), *cpu_seconds.values())} == {4}
