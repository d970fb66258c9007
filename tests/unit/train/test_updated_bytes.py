"""What prices say that an optimiser's step reads and writes is what its operations read and write."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflop.costs import update_bytes
from dflop.train.adamw import AdamW, Rates, squared_norm
from dflop.train.sharded_optimizer import ShardedAdamW

NUM_VALUES = 2**14
# How often an operation touches each of its tensors. AdamW's are values, gradients and two moments: all are read, all
# but the gradients are written, and so are the scalars.
TOUCHES = {"zero_": 1, "linalg_vector_norm": 1, "mul_": 2, "copy_": 1, "_fused_adamw_": 7 / 4, "detach": 0}


class Touched(TorchDispatchMode):
    """Adds up the bytes that operations on large tensors read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        large = [own for own in tree_leaves(args) if isinstance(own, torch.Tensor) and own.numel() >= NUM_VALUES / 2]
        name = func.overloadpacket.__name__
        if large and name not in ("view", "slice", "alias"):
            self.num_bytes += TOUCHES[name] * sum(own.nbytes for own in large)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("computed_in", "value_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_of_a_replica_that_holds_whole_parameters(computed_in, value_bytes):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = nn.Parameter(torch.randn(NUM_VALUES // 64, 64))
        optimizer = ShardedAdamW([weight], dist.group.WORLD, rates={weight: Rates(1e-3, 0.0)}, computed_in=computed_in)
        with Touched() as touched:
            optimizer.zero_grad()
            optimizer.sum_gradients()
            optimizer.norm_squared()
            optimizer.step(1.0, 0.5)
    finally:
        dist.destroy_process_group()
    assert touched.num_bytes == pytest.approx(update_bytes(4.0 * NUM_VALUES, 1, value_bytes=value_bytes), rel=1e-3)


def test_of_a_replica_that_holds_a_shard():
    shard = nn.Parameter(torch.randn(NUM_VALUES))
    shard.grad, adamw = torch.randn(NUM_VALUES), AdamW({shard: Rates(1e-3, 0.0)})
    with Touched() as touched:  # as `ParameterShards` does
        squared_norm([shard.grad])
        adamw.step(1.0, {shard: shard.grad.mul_(0.5)}, {})
    whole = 8 * 4.0 * NUM_VALUES
    for value_bytes in (4, 2):
        of_shard = update_bytes(whole, 16, value_bytes=value_bytes, num_shards=8)
        assert touched.num_bytes == pytest.approx(of_shard, rel=1e-3)


def test_replicas_update_their_parts_and_each_sets_all_gradients_to_zero():
    alone, of_four = (update_bytes(4e6, dp, value_bytes=2) for dp in (1, 4))
    assert alone - of_four == pytest.approx(3 / 4 * 46e6)
    assert of_four == pytest.approx(46e6 / 4 + 4e6)
    assert update_bytes(0.0, 4, value_bytes=2) == 0.0
