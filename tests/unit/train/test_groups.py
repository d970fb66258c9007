"""A rank has few process groups, and making all takes few calls, however many ranks there are."""

from datetime import timedelta
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dflop.checks.plan_messages import num_communicators
from dflop.plan import Grid, Plan
from dflop.step import make_program
from dflop.train.groups import GroupMaker, rank_groups
from dflop.train.wires import make_links

WORLDS = [8, 64, 256, 1024]


def plan_of(placement: str, world_size: int) -> Plan:
    """An encoder on a quarter of the ranks, or on all; an LLM with every kind of group."""
    first = world_size // 4 if placement == "disjoint" else 0
    return Plan(
        placement=placement,
        grids=(
            Grid(module="vision", num_ranks=first or world_size, tp=2),
            Grid(module="llm", num_ranks=world_size - first, tp=1, pp=3 if first else 2, rank_offset=first),
        ),
        num_microbatches=4,
        schedule="interleaved_1f1b" if not first else "1f1b",
        num_chunks=1 if first else 2,
    )


@pytest.mark.parametrize("placement", ["disjoint", "colocated"])
def test_the_number_of_communicators_of_a_rank_does_not_grow_with_the_world(placement):
    counts = set()
    for world_size in WORLDS:
        counts.add(num_communicators(make_program(plan_of(placement, world_size), rank=0)))
    assert len(counts) == 1
    assert counts.pop() <= 12


@pytest.mark.parametrize("sharding", [{"sharding": "parameters"}, {"sharding": "hybrid", "shards": 2}])
def test_groups_for_one_purpose_share_no_rank_and_hold_the_right_ones(sharding):
    plan = Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=8, tp=2, **sharding),
            Grid(module="llm", num_ranks=6, pp=3, rank_offset=8),
        ),
        num_microbatches=2,
    )
    groups = rank_groups(make_program(plan, rank=0))
    for of_purpose in groups.values():
        ranks = list(chain.from_iterable(of_purpose))
        assert len(ranks) == len(set(ranks))
    assert groups["tensor", "vision"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups["replicas", "vision"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    if sharding["sharding"] == "hybrid":
        assert groups["shards", "vision"] == ((0, 2), (4, 6), (1, 3), (5, 7))
        assert groups["copies", "vision"] == ((0, 4), (2, 6), (1, 5), (3, 7))
    else:
        assert groups["shards", "vision"] == groups["replicas", "vision"]
        assert ("copies", "vision") not in groups
    assert groups["replicas", "llm"] == ((8, 9), (10, 11), (12, 13))
    assert groups["ends", "llm"] == ((8, 12), (9, 13))


def test_on_gpus_all_groups_for_a_purpose_are_one_split_of_the_world(monkeypatch):
    splits = []
    monkeypatch.setattr(dist, "split_group", lambda split_ranks, timeout: splits.append(split_ranks) or len(splits))
    maker = GroupMaker(torch.device("cuda"))
    assert maker.own(((0, 1), (2, 3))) == 1
    assert maker.own(((0, 2), (1, 3))) == 2
    assert maker.own(((2, 3), (0, 1))) == 1  # the same groups are made once
    assert splits == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]


def test_messages_on_gpus_hold_few_thread_blocks(monkeypatch):
    made = []
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda **how: made.append(how["pg_options"]))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    make_links(make_program(plan_of("disjoint", 8)), 0, torch.device("cuda"), torch.bfloat16, timedelta(seconds=9))
    assert made
    assert {own.config.max_ctas for own in made} == {4}
    assert {own._timeout for own in made} == {timedelta(seconds=9)}
