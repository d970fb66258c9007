"""AdamW shared out over replicas, against torch's own on the summed gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from dflop.training.sharded_optimizer import ShardedAdamW

pytestmark = pytest.mark.serial

_SHAPES = [(7, 9), (5,), (130, 3), (64,), (1,), (40, 40)]
_LR, _DECAY, _SCALE = 1e-2, 0.1, 0.3


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in _SHAPES]
    made[3].requires_grad_(False)
    return made


def _gradients(step: int, replica: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]


def _check_replica(replica: int, num_replicas: int, store: str, bucket_bytes: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=replica, world_size=num_replicas)
    own, plain = _parameters(), _parameters()
    sharded = ShardedAdamW(own, dist.group.WORLD, lr=_LR, weight_decay=_DECAY, fused=False, bucket_bytes=bucket_bytes)
    groups = [
        {"params": [p for p in plain if p.requires_grad and p.ndim > 1], "weight_decay": _DECAY},
        {"params": [p for p in plain if p.requires_grad and p.ndim <= 1], "weight_decay": 0.0},
    ]
    expected = torch.optim.AdamW(groups, lr=_LR)
    for step in range(3):
        sharded.zero_grad()
        for parameter, gradient in zip(own, _gradients(step, replica), strict=True):
            if parameter.requires_grad:
                (parameter * gradient).sum().backward()
        sharded.sum_gradients()
        norm_squared = torch.tensor(sharded.norm_squared(), dtype=torch.float64)
        dist.all_reduce(norm_squared)
        sharded.step(_LR, _SCALE)
        summed = [sum(each) for each in zip(*(_gradients(step, other) for other in range(num_replicas)), strict=True)]
        for parameter, gradient in zip(plain, summed, strict=True):
            parameter.grad = gradient * _SCALE if parameter.requires_grad else None
        expected.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain if p.requires_grad]) / _SCALE
        torch.testing.assert_close(norm_squared, norm**2)
        for parameter, reference in zip(own, plain, strict=True):
            torch.testing.assert_close(parameter.detach(), reference.detach(), rtol=1e-12, atol=1e-14)
    for parameter, reference in zip(own, plain, strict=True):
        # Every value has one owner, whose moments are those of the whole.
        owners = torch.zeros(parameter.numel())
        for piece in sharded.pieces(parameter):
            size = len(piece.moments["exp_avg"])
            owners[piece.start : piece.start + size] += 1
            for name, values in piece.moments.items():
                whole = expected.state[reference][name].flatten()
                torch.testing.assert_close(values, whole[piece.start : piece.start + size])
        dist.all_reduce(owners)
        assert (owners == float(parameter.requires_grad)).all()
    dist.destroy_process_group()


@pytest.mark.parametrize(("num_replicas", "bucket_bytes"), [(1, 2**20), (2, 1), (3, 1024)])
def test_replicas_update_what_they_own_as_one_adamw_updates_all(num_replicas, bucket_bytes, tmp_path):
    mp.spawn(_check_replica, (num_replicas, str(tmp_path / "store"), bucket_bytes), nprocs=num_replicas)


def test_a_frozen_stage_has_nothing_to_update(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        optimizer = ShardedAdamW([frozen], dist.group.WORLD, lr=_LR, weight_decay=_DECAY, fused=False)
        optimizer.zero_grad()
        optimizer.sum_gradients()
        optimizer.step(_LR, 1.0)
        assert optimizer.norm_squared() == 0
        assert optimizer.pieces(frozen) == []
        assert (frozen == 1).all()
    finally:
        dist.destroy_process_group()
