"""A grid cannot contradict itself, and grids that do not tile the world are refused by rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.plan import Grid, tile_world

sizes = st.integers(1, 5)


@given(tp=sizes, pp=sizes, dp=sizes, offset=st.integers(0, 20))
def test_ranks_run_over_tp_then_dp_then_pp_without_a_gap(tp, pp, dp, offset):
    grid = Grid(module="llm", num_ranks=tp * pp * dp, tp=tp, pp=pp, rank_offset=offset)
    assert grid.dp == dp
    firsts = [grid.first_rank(stage, replica) for stage in range(pp) for replica in range(dp)]
    assert firsts == list(range(offset, offset + tp * pp * dp, tp))


def test_a_grid_that_does_not_divide_says_which_number_would():
    with pytest.raises(UserError, match=r"llm: 6 ranks cannot be split into tp=2 x pp=2; use a multiple of 4"):
        Grid(module="llm", num_ranks=6, tp=2, pp=2)
    with pytest.raises(UserError, match="0 ranks"):
        Grid(module="llm", num_ranks=0)
    with pytest.raises(UserError, match="llm: tp=0 and pp=1 must be at least 1"):
        Grid(module="llm", num_ranks=2, tp=0)
    with pytest.raises(UserError, match="llm: sharding is 'zero3'; it must be one of hybrid, optimizer, parameters"):
        Grid(module="llm", num_ranks=2, sharding="zero3")
    with pytest.raises(UserError, match=r"llm: sharding=parameters with pp=2 .*; use pp: 1, or sharding: optimizer"):
        Grid(module="llm", num_ranks=4, pp=2, sharding="parameters")
    with pytest.raises(UserError, match="llm: shards=2 with sharding=parameters, which fixes them"):
        Grid(module="llm", num_ranks=4, sharding="parameters", shards=2)
    for shards in (None, 1, 3, 4):
        with pytest.raises(UserError, match=f"shards={shards}; it must be .* a part of dp=4"):
            Grid(module="llm", num_ranks=4, sharding="hybrid", shards=shards)
    with pytest.raises(UserError, match=r"llm: layers \[3, 0\]; every pipeline stage needs at least one"):
        Grid(module="llm", num_ranks=2, pp=2, layers=(3, 0))


@given(st.lists(sizes, min_size=1, max_size=5))
def test_grids_one_after_the_other_tile_the_world(counts):
    grids = [
        Grid(module=f"m{place}", num_ranks=count, rank_offset=sum(counts[:place])) for place, count in enumerate(counts)
    ]
    tile_world(grids, sum(counts))
    tile_world(grids[::-1], sum(counts))


@pytest.mark.parametrize(
    ("offset", "world_size", "complaint"),
    [
        (1, 4, "rank 1 is owned by vision and llm"),
        (3, 5, "rank 2 is owned by no module"),
        (2, 5, "rank 4 is owned by no module"),
        (2, 3, "llm owns rank 3, but there are only 3 ranks"),
    ],
)
def test_the_first_rank_with_no_or_two_owners_is_named(offset, world_size, complaint):
    grids = [Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=2, rank_offset=offset)]
    with pytest.raises(UserError, match=complaint):
        tile_world(grids, world_size)


def test_a_grid_knows_among_how_many_replicas_parameters_are_divided():
    shards = {
        name: Grid(module="llm", num_ranks=8, tp=2, sharding=name, shards=2 if name == "hybrid" else None)
        for name in ("optimizer", "parameters", "hybrid")
    }
    assert {name: grid.num_shards for name, grid in shards.items()} == {"optimizer": 1, "parameters": 4, "hybrid": 2}
    assert [name for name, grid in shards.items() if grid.gathers] == ["parameters", "hybrid"]
    alone = Grid(module="llm", num_ranks=1, sharding="parameters")
    assert not alone.gathers  # there is nobody to share with
