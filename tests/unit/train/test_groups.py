"""Groups for one purpose are made by one call, however many ranks there are."""

import inspect
from datetime import timedelta
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dflop.plan import Grid, Plan
from dflop.step import make_program
from dflop.train.groups import GroupMaker, rank_groups
from dflop.train.wires import make_links


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
    grids = (Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=6, pp=2, rank_offset=2))
    program = make_program(Plan(placement="disjoint", grids=grids, num_microbatches=2))
    make_links(program, 0, torch.device("cuda"), torch.bfloat16, timedelta(seconds=9))
    assert made
    assert {own.config.max_ctas for own in made} == {4}
    assert {own._timeout for own in made} == {timedelta(seconds=9)}


@pytest.mark.parametrize("world_size", [16, 1024])
def test_starting_takes_as_many_calls_on_a_thousand_ranks_as_on_sixteen(world_size, monkeypatch):
    splits = []
    monkeypatch.setattr(dist, "split_group", lambda split_ranks, timeout: splits.append(split_ranks) or len(splits))
    grids = (
        Grid(module="vision", num_ranks=world_size, tp=2, sharding="hybrid", shards=2),
        Grid(module="llm", num_ranks=world_size, tp=4, pp=2),
    )
    maker = GroupMaker(torch.device("cuda"))
    program = make_program(Plan(placement="colocated", grids=grids, num_microbatches=2), rank=0)
    for groups in rank_groups(program).values():
        maker.own(groups)
    assert len(splits) == 7


def test_torch_takes_the_arguments_with_which_groups_are_made():
    """Calls that a CPU does not make; `make test-torch211` asks the oldest supported version."""
    timeout = timedelta(seconds=1)
    inspect.signature(dist.split_group).bind(split_ranks=[[0]], timeout=timeout)
    inspect.signature(dist.new_group).bind(timeout=timeout, pg_options=None)
