"""Tensor parallelism of a stage, as in Megatron: ranks divide its heads, its MLPs' inner width and its vocabulary.

A stage says which of its matrices these are (`Division`); here they are divided.

A stage's inputs and outputs are the same whole tensors on every rank. Norms, the patch embedding and biases after a
reduction are whole on every rank. Of the other parameters each rank has a part, and `stage.shards` says which.

Between the blocks of an LLM's layers each rank has a part of the tokens (`token_parts.py`): a layer gathers and sums
them twice in forward and twice in backward. Of the gradients of what is whole in the layers each rank then has a part
(`Stage.partial_gradients`), and the parts are summed once a step. In an encoder the residual stream is whole, and
hidden states are all-reduced twice a layer in forward and twice in backward. All of it in the dtype of the matrix
products. Norms over a divided width all-reduce one number a position more. Logits are not gathered.

Parameters and activations are plain tensors: dispatching DTensors through a layer, as torch's `ColwiseParallel` and
`RowwiseParallel` do, takes several times as long as dispatching the layer itself.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dflop.models.loss_head import LossHead
from dflop.models.stages import Stage
from dflop.models.tensor_group import Shard, TensorGroup
from dflop.models.token_parts import gather_tokens, sum_own_tokens

__all__ = ["Divider", "RowLinear", "columns_of"]


class Divider:
    """Divides a stage's blocks, embedding and head in place, one at a time, as the whole stage may not fit on a rank.

    Raises:
        UserError: when it is not known how to divide the stage's layers.
    """

    def __init__(self, stage: Stage, ranks: TensorGroup) -> None:
        self._stage, self._ranks, self._division = stage, ranks, stage.division()
        stage.ranks = ranks
        self._blocks = [re.compile(own.replace(".", r"\.").replace("*", r"\d+")) for own in self._division.blocks]

    def divide(self, name: str, module: nn.Module) -> None:
        """Divide a submodule of `stage.hf`, named `name`, whose weights are drawn. Others than those of the division
        stay as they are."""
        if any(pattern.fullmatch(name) for pattern in self._blocks):
            self._divide_block(name, module)
        elif name == self._division.embedding:
            self._replace(name, _Embedding(module, self._ranks))
        elif name == self._division.head:
            assert isinstance(module, LossHead), "only an LLM has a head over a vocabulary"
            # All ranks have the same number of chunks, although the last ranks may have fewer ids.
            vocabulary, first_id = module.out_features / self._ranks.size, self._ranks.part(module.out_features).start
            own = columns_of(module, self._ranks, 1)
            self._replace(name, head := LossHead.of(own, vocabulary, first_id=first_id, group=self._ranks.group))
            _reduce_input_gradient(head, self._ranks.group)

    def _divide_block(self, name: str, block: nn.Module) -> None:
        division, readers = self._division, []
        for child_name, child in list(block.named_children()):
            if child_name in division.columns:
                num_stacked = division.stacked.get(child_name, 1)
                reader = columns_of(child, self._ranks, num_stacked)
                self._replace(f"{name}.{child_name}", reader, num_stacked)
                readers.append(reader)
            elif child_name in division.rows:
                self._replace(f"{name}.{child_name}", RowLinear(child, self._ranks, division.cuts_tokens))
            elif child_name in division.norms and not isinstance(child, nn.Identity):
                self._replace(f"{name}.{child_name}", _SharedNorm(child, self._ranks))
        for size in division.sizes:
            if hasattr(block, size):
                own = self._ranks.part(getattr(block, size))
                setattr(block, size, own.stop - own.start)
        if division.cuts_tokens:
            _gather_input(block, self._ranks)
        else:  # with a single reader, the block may have an undivided part before it, which needs the whole gradient
            _reduce_input_gradient(block if len(readers) > 1 else readers[0], self._ranks.group)

    def _replace(self, name: str, divided: nn.Module, num_stacked: int = 1) -> None:
        whole = self._stage.hf.get_submodule(name)
        self._stage.hf.set_submodule(name, divided)
        for own, parameter in divided.named_parameters():
            was, dim = whole.get_parameter(own).shape, 1 if isinstance(divided, RowLinear) else 0
            if parameter.shape != was:
                start = self._ranks.part(was[dim] // num_stacked).start
                self._stage.shards[f"{name}.{own}"] = Shard(dim, start, was, num_stacked)


def _shard(whole: nn.Parameter, ranks: TensorGroup, dim: int, num_stacked: int = 1) -> nn.Parameter:
    each = whole.detach().unflatten(dim, (num_stacked, -1))
    part = ranks.part(each.shape[dim + 1])
    own = each.narrow(dim + 1, part.start, part.stop - part.start).flatten(dim, dim + 1)
    return nn.Parameter(own.clone(memory_format=torch.contiguous_format), whole.requires_grad)


def _reduce_input_gradient(block: nn.Module, group: dist.ProcessGroup | None) -> None:
    """All-reduce the gradient of a block's input, once for all matrices that read the input."""
    _change_input(block, lambda hidden, _: _SumGradient.apply(hidden, group))


def _gather_input(block: nn.Module, ranks: TensorGroup) -> None:
    """Give a block all tokens in place of the rank's part."""

    def gather(part: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        gathered = gather_tokens(part, ranks)
        if (rotary := kwargs.get("position_embeddings")) is None:
            return gathered
        return gathered[:, : rotary[0].shape[-2]]  # attention takes as many tokens as have positions

    _change_input(block, gather)


def _change_input(block: nn.Module, change: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]) -> None:
    """Give a block `change(hidden states, keyword arguments)` in place of the hidden states."""

    def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        hidden = change(args[0] if args else kwargs["hidden_states"], kwargs)
        return ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": hidden})

    block.register_forward_pre_hook(read, with_kwargs=True)


def columns_of(whole: nn.Linear, ranks: TensorGroup, num_stacked: int) -> nn.Linear:
    """This rank's part of a linear layer that is divided by outputs: a smaller linear layer."""
    weight = _shard(whole.weight, ranks, 0, num_stacked)
    own = nn.Linear(weight.shape[1], weight.shape[0], whole.bias is not None, device="meta")
    own.weight = weight
    if whole.bias is not None:
        own.bias = _shard(whole.bias, ranks, 0, num_stacked)
    return own


class RowLinear(nn.Module):
    """A linear layer that is divided by inputs. Its output is the sum over ranks: if it `cuts_tokens`, of the rank's
    part of the tokens, else the whole."""

    def __init__(self, whole: nn.Linear, ranks: TensorGroup, cuts_tokens: bool) -> None:
        super().__init__()
        self.weight, self.bias = _shard(whole.weight, ranks, 1), whole.bias
        self.ranks, self.cuts_tokens = ranks, cuts_tokens

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        partial = functional.linear(inner, self.weight)
        summed = sum_own_tokens(partial, self.ranks) if self.cuts_tokens else _Sum.apply(partial, self.ranks.group)
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class _SharedNorm(nn.Module):
    """A root-mean-square norm over a width of which each rank has a part. The mean is over the whole width."""

    def __init__(self, whole: nn.Module, ranks: TensorGroup) -> None:
        super().__init__()
        self.weight, self.eps, self.group = _shard(whole.weight, ranks, 0), whole.variance_epsilon, ranks.group
        self.width = len(whole.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = _at_least_float32(hidden)
        squares = _Sum.apply(wide.pow(2).sum(-1, keepdim=True), self.group)
        mean = _SumGradient.apply(squares, self.group) / self.width
        return self.weight * (wide * torch.rsqrt(mean + self.eps)).to(hidden.dtype)


def _at_least_float32(hidden: torch.Tensor) -> torch.Tensor:
    """`hidden` in float32, in which transformers' norms compute, or in float64 if it is float64."""
    return hidden if hidden.dtype == torch.float64 else hidden.float()


class _Embedding(nn.Module):
    """An embedding of which each rank holds some ids, from `first_id` on."""

    def __init__(self, whole: nn.Embedding, ranks: TensorGroup) -> None:
        super().__init__()
        self.first_id = ranks.part(whole.num_embeddings).start
        self.weight, self.group = _shard(whole.weight, ranks, 0), ranks.group
        self.num_ids = len(self.weight)
        padding_id = -1 if whole.padding_idx is None else whole.padding_idx - self.first_id
        self.padding_id = padding_id if 0 <= padding_id < self.num_ids else None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        local_ids = token_ids - self.first_id
        is_elsewhere = (local_ids < 0) | (local_ids >= self.num_ids)
        found = functional.embedding(local_ids.masked_fill(is_elsewhere, 0), self.weight, self.padding_id)
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
    """The identity, whose gradient is summed over ranks: every rank reads the whole tensor and computes a part of its
    gradient."""

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
