"""Two replicas share a module's parameters, and only one of them has used all of them in a pass.

torch 2.11 has no way of its own to sum zeros for the other. Here it is taken from later versions.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import spawn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dflop.base.torch_versions import reduce_unused, with_unused

pytestmark = pytest.mark.serial


class _Sometimes(nn.Module):
    """Three layers, of which the first is a unit and the last is only used for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unit, self.always, self.sometimes = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: torch.Tensor, uses_all: bool) -> torch.Tensor:
        hidden = self.always(self.unit(inputs))
        return with_unused(self, (self.sometimes(hidden) if uses_all else hidden).square().sum())


def _run(rank: int, folder: str, has_own_way: bool) -> None:
    if not has_own_way and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        del FSDPModule.set_reduce_scatter_unused_params
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), 2, rank)
    inputs = [torch.arange(8.0).reshape(2, 4) + number for number in range(2)]
    alone = _Sometimes()
    sum(alone(inputs[number], uses_all=number == 0) for number in range(2)).backward()
    shared = _Sometimes()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for unit in (shared.unit, shared):
        fully_shard(unit, mesh=mesh).set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        reduce_unused(unit)
    shared(inputs[rank], uses_all=rank == 0).backward()
    for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    dist.destroy_process_group()


@pytest.mark.parametrize("has_own_way", [True, False])
def test_gradients_are_summed_where_one_replica_has_not_used_a_parameter(has_own_way, tmp_path):
    spawn(_run, (str(tmp_path), has_own_way), nprocs=2)
