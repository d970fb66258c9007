"""What a process that measures costs holds of a GPU beside the model."""

import torch
import torch.distributed as dist

from dflop.costs.profile_rank import bytes_of_meeting
from dflop.models.tensor_group import ALONE, TensorGroup


def test_the_communicator_of_ranks_that_measure_together_is_told_apart(monkeypatch):
    free, summed = iter([70 * 2**30, 69 * 2**30]), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free), 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: summed.append(group))
    device = torch.device("meta")  # any but the CPU
    assert bytes_of_meeting(ALONE, device) == 0
    assert bytes_of_meeting(TensorGroup((0, 1), 0, "group"), device) == 2**30
    assert summed == ["group"]
