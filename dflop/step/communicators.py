"""How many communicators a rank of a plan is in, without a look at each of its ranks: searches ask for every plan.

`routes` and `train.groups` decide which there are; tests hold this count against them.
"""

from collections.abc import Iterator

from dflop.plan.grid import Grid
from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan
from dflop.step.nodes import StageReplicas, stages_of
from dflop.step.routes import track_of

__all__ = ["CHANNEL_SHARE", "COLLECTIVE_CTAS", "communicator_bytes", "num_communicators"]

# Thread blocks that a collective is taken to have: as many channels as NCCL reports on nodes with NVSwitch.
COLLECTIVE_CTAS = 24
# Bytes of a channel of messages, as a share of those of a communicator for collectives: NCCL has buffers for each
# thread block. On an H200 alone in its world they were 29 and 408 MB. Buffers of connections to other ranks come on
# top, which nobody has measured here: they are taken to be 0.2 GB.
CHANNEL_SHARE = 0.6


def num_communicators(plan: Plan, *, is_tied: bool = True) -> int:
    """Communicators of a rank at most: the world's, those of channels, and those of its modules' groups. A replica that
    is alone has one, too; the ends of a pipeline without a tied head (`is_tied`) have none."""
    return _num_groups(plan, is_tied) + _num_channels(plan)


def communicator_bytes(plan: Plan, bytes_of_group: float, *, is_tied: bool = True) -> float:
    """Bytes of a rank's communicators, if one for collectives takes `bytes_of_group`."""
    return (_num_groups(plan, is_tied) + CHANNEL_SHARE * _num_channels(plan)) * bytes_of_group


def _num_groups(plan: Plan, is_tied: bool) -> int:
    """The world's, and those of modules."""
    return 1 + len({key for grid in plan.grids for key in _groups_of(grid, is_tied)})


def _num_channels(plan: Plan) -> int:
    """Channels over which there are messages (`routes.channels_of`)."""
    tracks: set[int] = set()
    for grid in plan.grids:
        if grid.pp > 1:
            places = range(min(grid.pp, plan.num_stages(grid.module) - 1))
            tracks |= {track_of(place, grid.pp) for place in places}
    return 2 * len(tracks) + _num_bridge_channels(plan)


def _num_bridge_channels(plan: Plan) -> int:
    """Directions in which features or their gradients go to a rank that does not make them itself."""
    stages = stages_of(plan)
    llm = next(stage for stage in stages if stage.module == "llm")
    if not PLACEMENTS[plan.placement].has_bridges:
        return 0
    directions = set()
    for grid in plan.grids[:-1]:
        encoder = [stage for stage in stages if stage.module == grid.module][-1]
        # No rank is in several replicas. So nothing is sent only if one replica makes all, on all ranks that take it.
        directions |= {True} if encoder.dp > 1 or not _workers(llm) <= _workers(encoder) else set()
        directions |= {False} if llm.dp > 1 or not _workers(encoder) <= _workers(llm) else set()
    return len(directions)


def _workers(stage: StageReplicas) -> set[int]:
    return set(range(stage.first_worker, stage.first_worker + stage.dp * stage.span))


def _groups_of(grid: Grid, is_tied: bool) -> Iterator[tuple[int, ...]]:
    """A module's groups, by what two modules with the same groups have in common: their ranks, and how blocks of
    consecutive ranks are divided among them, as (size of a block, distance between ranks of a group)."""
    replicas, shards = grid.dp * grid.tp, grid.num_shards * grid.tp
    divided = {(grid.tp, 1), (replicas, grid.tp)}
    if grid.num_shards > 1:
        divided |= {(shards, grid.tp), (replicas, shards)}
    if grid.cp > 1:
        divided.add((grid.cp * grid.tp, grid.tp))
    if is_tied and grid.module == "llm" and grid.pp > 1:  # the ends of its pipeline
        divided.add((grid.num_ranks, grid.num_ranks - replicas))
    if grid.dp == 1:  # groups of one rank
        yield grid.rank_offset, grid.num_ranks, 1, 1
    for block, distance in divided:
        if block > distance:
            yield grid.rank_offset, grid.num_ranks, block, distance
