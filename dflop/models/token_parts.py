"""Hidden states of which each tensor-parallel rank has the tokens of its part: sequence parallelism.

Between an LLM's divided blocks every rank holds a part of the tokens, so that norms and the residual stream take a
part of the memory and of the time. A block gathers all tokens, and its output is summed and cut into parts at once. A
gather and such a sum together move as many bytes as the all-reduce in whose place they stand (Korthikanti et al.,
"Reducing activation recomputation in large transformer models", 2022, section 4.2.2). As in torchtitan, what a block
gathered is kept for its backward.

All parts have the same number of tokens. The last ones are filled up with zeros, to which biases may be added. No
token's result depends on them, and their gradients are zero.
Hidden states are [1, num_tokens, hidden_size].
"""

from typing import Any

import torch
from torch.nn.functional import pad

from dflop.models.tensor_group import TensorGroup

__all__ = ["all_tokens", "gather_tokens", "own_tokens", "sum_own_tokens"]


def own_tokens(whole: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
    """This rank's part of hidden states that are the same on every rank."""
    return whole if ranks.size == 1 else _Own.apply(whole, ranks)


def all_tokens(part: torch.Tensor, num_tokens: int, ranks: TensorGroup) -> torch.Tensor:
    """The hidden states of `num_tokens` tokens from the ranks' parts, for a reader that every rank computes alike."""
    return part if ranks.size == 1 else _All.apply(part, num_tokens, ranks)


def gather_tokens(part: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
    """All ranks' parts, for readers of whose gradient each rank computes a part. Tokens that fill the last parts up are
    left in."""
    return _Gather.apply(part, ranks.size, ranks.group.group_name)


def sum_own_tokens(partial: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
    """This rank's part of the sum of all ranks' hidden states."""
    return _SumOwn.apply(partial, ranks.size, ranks.group.group_name)


def _gathered(part: torch.Tensor, size: int, group: str) -> torch.Tensor:
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(part.contiguous()[0], size, group)
    return torch.ops._c10d_functional.wait_tensor(gathered).unsqueeze(0)


def _summed(partial: torch.Tensor, size: int, group: str) -> torch.Tensor:
    filled = _filled(partial, size).contiguous()[0]
    summed = torch.ops._c10d_functional.reduce_scatter_tensor(filled, "sum", size, group)
    return torch.ops._c10d_functional.wait_tensor(summed).unsqueeze(0)


def _filled(whole: torch.Tensor, size: int) -> torch.Tensor:
    """The hidden states with as many tokens of zeros behind them as equal parts need."""
    missing = -whole.shape[1] % size
    return pad(whole, (0, 0, 0, missing)) if missing else whole


def _cut(whole: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
    """This rank's part, as a copy: a view would keep the whole."""
    return _filled(whole, ranks.size).chunk(ranks.size, dim=1)[ranks.place].clone(memory_format=torch.contiguous_format)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
        ctx.num_tokens, ctx.ranks = whole.shape[1], ranks
        return _cut(whole, ranks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(gradient, ctx.ranks.size, ctx.ranks.group.group_name)[:, : ctx.num_tokens], None


class _All(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, num_tokens: int, ranks: TensorGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return _gathered(part, ranks.size, ranks.group.group_name)[:, :num_tokens]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _cut(gradient, ctx.ranks), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.size, ctx.group = size, group
        return _gathered(part, size, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _summed(gradient, ctx.size, ctx.group), None, None


class _SumOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.size, ctx.group, ctx.num_tokens = size, group, partial.shape[1]
        return _summed(partial, size, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(gradient, ctx.size, ctx.group)[:, : ctx.num_tokens], None, None
