"""The communicators of a rank are counted from the plan alone as they are made."""

from collections import defaultdict

import pytest
from drawn_plans import plans
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.plan import Grid, Plan
from dflop.step import communicator_bytes, make_program, num_communicators
from dflop.step.communicators import CHANNEL_SHARE
from dflop.step.routes import channels_of, make_routes
from dflop.train.groups import rank_groups, ranks_of_nodes


def made(plan: Plan, is_tied: bool) -> int:
    """The world's communicator, those of channels, and those of groups of several ranks."""
    program = make_program(plan, rank=0)
    channels = channels_of(program.edges, make_routes(program.workers, program.edges))
    groups = {frozenset(groups) for groups in rank_groups(program, is_tied=is_tied).values()}
    return 1 + len(channels) + len(groups)


@settings(max_examples=300)
@given(plan=plans(), is_tied=st.booleans())
def test_as_many_are_counted_as_are_made(plan, is_tied):
    assert num_communicators(plan, is_tied=is_tied) == made(plan, is_tied)


def test_the_ends_of_a_pipeline_have_a_communicator_only_where_they_share_a_tied_head():
    grids = (Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=6, pp=3, rank_offset=2))
    plan = Plan(placement="disjoint", grids=grids, num_microbatches=3)
    assert num_communicators(plan, is_tied=True) == num_communicators(plan, is_tied=False) + 1
    assert communicator_bytes(plan, 1e6, is_tied=True) == communicator_bytes(plan, 1e6, is_tied=False) + 1e6
    assert ("ends", "llm") not in rank_groups(make_program(plan, rank=0), is_tied=False)


def test_a_channel_of_messages_takes_a_share_of_a_communicator_for_collectives():
    llm = Grid(module="llm", num_ranks=2, pp=2)
    plan = Plan(placement="monolithic", grids=(Grid(module="vision", num_ranks=1), llm), num_microbatches=2)
    num_groups = 1 + len({frozenset(own) for own in rank_groups(make_program(plan, rank=0), is_tied=False).values()})
    num_channels = num_communicators(plan, is_tied=False) - num_groups
    assert num_channels
    needed_bytes = (num_groups + num_channels * CHANNEL_SHARE) * 1e6
    assert communicator_bytes(plan, 1e6, is_tied=False) == pytest.approx(needed_bytes)


@settings(max_examples=100)
@given(plan=plans())
def test_every_rank_is_in_one_group_of_its_replicas_even_if_it_is_alone_there(plan):
    """torch takes no group for the group of all ranks."""
    program = make_program(plan, rank=0)
    groups, alike = rank_groups(program), defaultdict(list)
    for node, ranks in zip(program.nodes, ranks_of_nodes(program), strict=True):
        for place, rank in enumerate(ranks):
            alike[node.module, node.pp_stage, place].append(rank)
    for (module, *_), ranks in alike.items():
        assert [group for group in groups["replicas", module] if ranks[0] in group] == [tuple(ranks)]


@pytest.mark.parametrize("placement", ["disjoint", "colocated"])
def test_their_number_does_not_grow_with_the_world(placement):
    counts = set()
    for world_size in (16, 64, 256, 1024):
        first = world_size // 4 if placement == "disjoint" else 0
        plan = Plan(
            placement=placement,
            grids=(
                Grid(module="vision", num_ranks=first or world_size, tp=2),
                Grid(module="llm", num_ranks=world_size - first, tp=1, pp=3 if first else 2, rank_offset=first),
            ),
            num_microbatches=4,
            schedule="1f1b" if first else "interleaved_1f1b",
            num_chunks=1 if first else 2,
        )
        counts.add(num_communicators(plan))
    assert len(counts) == 1
    assert counts.pop() <= 12
