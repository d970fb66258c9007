"""What torch 2.11 lacks of what we use: it is asked for by name, and done in another way where it is missing.

Later versions may have it back under another name: a test binds what we pass to the signatures of both.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = ["grouped_queries", "reduce_unused", "with_unused"]

_REDUCES_UNUSED = "set_reduce_scatter_unused_params"


@functools.cache
def grouped_queries(varlen_attn: Callable[..., Any]) -> dict[str, bool]:
    """What `torch.nn.attention.varlen.varlen_attn` must be told so that it takes fewer key-value heads than queries.

    torch 2.11 checks no numbers of heads and hands them to the same kernel, which repeats key-value heads by itself.
    """
    name = "enable_gqa"
    return {name: True} if name in inspect.signature(varlen_attn).parameters else {}


def reduce_unused(shared: FSDPModule) -> None:
    """Have an FSDP2 unit sum zeros for parameters that no pass has used on this rank, as other ranks may have used
    them. Without torch's own way, `with_unused` does so."""
    if hasattr(shared, _REDUCES_UNUSED):
        getattr(shared, _REDUCES_UNUSED)(True, recurse=False)


def with_unused(shared: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Call this in the forward of an FSDP2 root: the output, whose backward gives the root's own parameters a gradient
    of zeros beside what they have. The root's own are those that none of its inner units has.

    It does nothing if torch has its own way. Inner units must be used as a whole, or not at all on any rank.
    """
    if hasattr(shared, _REDUCES_UNUSED) or not output.requires_grad:
        return output
    gathered = [own for own in shared.parameters() if own.requires_grad and not isinstance(own, DTensor)]
    return _WithZeros.apply(output, *gathered)


class _WithZeros(torch.autograd.Function):
    """The identity of its first argument. The gradients of the others are zeros."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [own.shape for own in parameters]
        ctx.zeros = [own.new_zeros(()) for own in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (zero.expand(shape) for zero, shape in zip(ctx.zeros, ctx.shapes, strict=True))
        return (*gradients, *zeros)
