"""Linear layers whose weights' gradients can be put off, for schedules that split the backward.

A backward then computes what the stage before waits for, and the gradients of the matrices come later, when nobody
waits (Qi et al., "Zero bubble pipeline parallelism", 2023). What is not a linear layer (norms, embeddings,
convolutions) is a small part of a stage's work, and is computed at once. Putting off is done in the layer rather than
with torch's `stage_backward_input` and `stage_backward_weight`: those walk the whole autograd graph for every
microbatch, keep all of it until the second part, and are no public interface.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from dflop.models.loss_head import LossHead
from dflop.models.tensor_parallel import RowLinear

__all__ = ["Deferral"]


class _Pending(NamedTuple):
    """A gradient to be computed: d loss / d weight is `gradient`^T `inputs`, both [num_rows, …]."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    inputs: torch.Tensor
    gradient: torch.Tensor


class Deferral:
    """Over the linear layers of one stage, whose gradients must exist (`weight.grad`) before they are put off."""

    def __init__(self, stage: nn.Module) -> None:
        self._pending: list[_Pending] | None = None
        for module in stage.modules():
            if isinstance(module, LossHead):
                module.put_off = self.put_off
            elif isinstance(module, nn.Linear):
                module.forward = partial(_product, self, module, module.bias)
            elif isinstance(module, RowLinear):
                # Its bias comes behind the sum over ranks, and is no part of the product.
                module.product = partial(_product, self, module, None)

    @contextmanager
    def collecting(self) -> Iterator[list[_Pending]]:
        """Put off the weights' gradients of a backward inside; they are in the list, for `compute`."""
        self._pending = []
        try:
            yield self._pending
        finally:
            self._pending = None

    @torch.no_grad()
    def compute(self, pending: list[_Pending]) -> None:
        """Add the gradients that were put off, the oldest first, and let go of what they are made from."""
        while pending:
            item = pending.pop(0)
            product = item.gradient.T @ item.inputs
            item.weight.grad.add_(product)
            if item.bias is not None:
                item.bias.grad.add_(item.gradient.sum(0))

    def put_off(
        self, weight: nn.Parameter, bias: nn.Parameter | None, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> bool:
        """Put off one layer's gradients; False where they are wanted now."""
        if self._pending is None:
            return False
        rows = inputs.reshape(-1, inputs.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        self._pending.append(_Pending(weight, bias, *rows))
        return True


def _product(
    deferral: Deferral, layer: nn.Linear | RowLinear, bias: nn.Parameter | None, inputs: torch.Tensor
) -> torch.Tensor:
    if not (layer.weight.requires_grad and torch.is_grad_enabled()):
        return functional.linear(inputs, layer.weight, bias)
    return _Linear.apply(inputs, layer.weight, bias, deferral)


class _Linear(torch.autograd.Function):
    """`inputs @ weight.T + bias`, whose backward asks the deferral what is wanted now."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, deferral):
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.bias, ctx.deferral = weight, bias, deferral
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        (inputs,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        of_inputs = gradient @ weight if ctx.needs_input_grad[0] else None
        if ctx.deferral.put_off(weight, bias, inputs, gradient):
            return of_inputs, None, None, None
        rows, sums = inputs.reshape(-1, inputs.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        return of_inputs, sums.T @ rows, None if bias is None else sums.sum(0), None
