"""Ranks leave their groups in the order in which they made them, whatever the groups are called."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.testing._internal.distributed.fake_pg import FakeStore

from dflop.base.rendezvous import leave_ranks


def test_groups_are_left_in_the_order_in_which_they_were_made_and_the_world_last(monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    world = dist.group.WORLD
    made = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2], [2, 3], [0, 3])]
    own = [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]
    # As names of split groups, which hold hashes: in another order than the groups, and on no two ranks the same.
    for group, name in zip([world, *own], ("0", "c1", "0f", "a7"), strict=True):
        _world.pg_names[group] = name
    left, shutdown = [], dist.ProcessGroup.shutdown
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", lambda group: (left.append(group), shutdown(group)))
    leave_ranks()
    assert left == [*own, world]
    assert not dist.is_initialized()
