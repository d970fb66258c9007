"""A rank's device: its own GPU, or a refusal that every rank of the node gives alike."""

import pytest
import torch

from dflop.base import UserError
from dflop.base.local_device import local_device


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_node_with_fewer_gpus_than_ranks_is_refused_by_all_of_them_with_both_numbers(local_rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"2 rank\(s\) of this node want a GPU each.* torch finds 1 GPU\(s\) here"):
        local_device("cuda")


def test_convolutions_in_fp32_compute_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    local_device("cpu")
    assert not torch.backends.cudnn.allow_tf32
