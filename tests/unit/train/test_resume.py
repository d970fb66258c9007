"""Ranks wait for each other's files over the group that they are given, with a time limit for slow disks."""

from types import SimpleNamespace

import torch.distributed as dist

from dflop.config import TrainConfig
from dflop.train.resume import take_up


def test_no_rank_waits_for_files_over_the_group_of_training(tmp_path, monkeypatch):
    groups = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group(backend="gloo")
        monkeypatch.setattr(dist, "barrier", groups.append)
        monkeypatch.setattr(dist, "broadcast_object_list", lambda values, group=None: groups.append(group))
        files = SimpleNamespace(out=tmp_path, checkpoints=tmp_path / "checkpoints")
        assert take_up(TrainConfig(), files, None, None, group) == (0, 0)
    finally:
        dist.destroy_process_group()
    assert groups == [group, group]
