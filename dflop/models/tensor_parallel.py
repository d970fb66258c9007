"""Tensor parallelism of a stage, as Megatron's: ranks share its heads, its MLPs' inner width and its vocabulary.

A stage says which of its matrices these are (`Division`); here they are divided.

What goes into a stage and comes out of it is the same whole tensor on every rank. Norms, residual stream, patch
embedding and biases after a reduction are whole on every rank, and so are their gradients; the other parameters
become DTensors. Hidden states are all-reduced twice a layer in forward and twice in backward, in the dtype of the
matrix products; the logits stay where they are computed.

Only parameters are DTensors: passes run on plain tensors, since dispatching DTensors through a layer, as
torch's `ColwiseParallel` and `RowwiseParallel` do, takes several times as long as dispatching the layer itself.
"""

import math
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from dflop.models.division import Division
from dflop.models.spec import ModelSpec, check_tp
from dflop.models.stages import Stage

__all__ = ["shard_stage"]


def shard_stage(stage: Stage, mesh: DeviceMesh, spec: ModelSpec, module: str) -> None:
    """Divide a module's stage, whose weights are the same on all ranks of the one-dimensional `mesh`, in place.

    Raises:
        UserError: when the ranks cannot share the attention heads, or the layers are of an unknown kind.
    """
    check_tp(spec, module, mesh.size())
    if mesh.size() == 1:
        return
    division = stage.division()
    blocks = [block for name, block in stage.hf.named_modules() if any(_fits(name, to) for to in division.blocks)]
    assert blocks or not stage.layers, f"the stage has none of the blocks {division.blocks}"
    for block in blocks:
        _shard_block(block, division, mesh)
    if division.head is not None:
        _shard_vocabulary(stage, division, mesh)


def _fits(name: str, pattern: str) -> bool:
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), name) is not None


def _shard_block(block: nn.Module, division: Division, mesh: DeviceMesh) -> None:
    for name, child in list(block.named_children()):
        if name in division.columns:
            setattr(block, name, _Columns(child, mesh))
        elif name in division.rows:
            setattr(block, name, _Rows(child, mesh))
    _reduce_input_gradient(block, mesh)


def _shard_vocabulary(stage: Stage, division: Division, mesh: DeviceMesh) -> None:
    hf, vocab_size = stage.hf, stage.hf.config.get_text_config().vocab_size
    first_id = mesh.get_local_rank() * math.ceil(vocab_size / mesh.size())  # as DTensor's Shard divides
    embedding = hf.get_submodule(division.embedding) if stage.is_first else None
    head = hf.get_submodule(division.head) if stage.is_last else None
    is_tied = embedding is not None and head is not None and head.weight is embedding.weight
    if embedding is not None:
        embedding = _Embedding(embedding, mesh, first_id)
        hf.set_submodule(division.embedding, embedding)
    if head is not None:
        head, group = _Columns(head, mesh), mesh.get_group()
        hf.set_submodule(division.head, head)
        _reduce_input_gradient(head, mesh)
        stage.summed_loss = lambda logits, target_ids: _SummedLoss.apply(logits, target_ids, first_id, group)
    if is_tied:
        head.weight = embedding.weight


def _shard(whole: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    # Every rank has the weights already: nothing is sent.
    return nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None), whole.requires_grad)


def _reduce_input_gradient(block: nn.Module, mesh: DeviceMesh) -> None:
    """All matrices that read the block's input share one cast of it and one all-reduce of its gradient."""
    group = mesh.get_group()

    def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        device = hidden.device.type
        if torch.is_autocast_enabled(device) and hidden.dtype == torch.float32:
            hidden = hidden.to(torch.get_autocast_dtype(device))
        hidden = _SumGradient.apply(hidden, group)
        return ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": hidden})

    block.register_forward_pre_hook(read, with_kwargs=True)


class _Columns(nn.Module):
    """A linear layer of which each rank computes some outputs."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = _shard(whole.weight, mesh, 0)
        self.bias = None if whole.bias is None else _shard(whole.bias, mesh, 0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.weight.to_local(), None if self.bias is None else self.bias.to_local())


class _Rows(nn.Module):
    """A linear layer of which each rank has some inputs; the sum of what they give is on all."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight, self.bias, self.group = _shard(whole.weight, mesh, 1), whole.bias, mesh.get_group()

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        summed = _Sum.apply(functional.linear(inner, self.weight.to_local()), self.group)
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class _Embedding(nn.Module):
    """An embedding of which each rank holds some ids, from `first_id` on."""

    def __init__(self, whole: nn.Embedding, mesh: DeviceMesh, first_id: int) -> None:
        super().__init__()
        self.weight, self.first_id, self.group = _shard(whole.weight, mesh, 0), first_id, mesh.get_group()
        self.num_ids = len(self.weight.to_local())
        padding_id = -1 if whole.padding_idx is None else whole.padding_idx - first_id
        self.padding_id = padding_id if 0 <= padding_id < self.num_ids else None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        local_ids = token_ids - self.first_id
        is_elsewhere = (local_ids < 0) | (local_ids >= self.num_ids)
        found = functional.embedding(local_ids.masked_fill(is_elsewhere, 0), self.weight.to_local(), self.padding_id)
        return _Sum.apply(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.group)


class _Sum(torch.autograd.Function):
    """The sum over ranks, in place; its gradient is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(partial)
        dist.all_reduce(partial, group=group)
        return partial

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    """What every rank reads whole; each knows a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, partial: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SummedLoss(torch.autograd.Function):
    """Summed cross entropy from logits [num_targets, local vocabulary]: two small all-reduces, none in backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target_ids: torch.Tensor, first_id: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        local_ids = target_ids - first_id
        is_here = (local_ids >= 0) & (local_ids < logits.shape[1])
        columns = local_ids.clamp(0, logits.shape[1] - 1).unsqueeze(1)
        at_target = logits.gather(1, columns).squeeze(1).masked_fill(~is_here, 0.0)
        local = logits.logsumexp(1)
        highest = local.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        sums = torch.stack([(local - highest).exp(), at_target])
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        whole = highest + sums[0].log()
        ctx.save_for_backward(logits, whole, columns, is_here)
        return (whole - sums[1]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, whole, columns, is_here = ctx.saved_tensors
        at_logits = (logits - whole.unsqueeze(1)).exp_()
        at_logits.scatter_add_(1, columns, -is_here.to(logits.dtype).unsqueeze(1))
        return at_logits.mul_(gradient), None, None, None
