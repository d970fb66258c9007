"""Linear layers whose weight gradients can be deferred, for schedules that split the backward.

A backward then computes only the gradient that the previous stage waits for. The gradients of the matrices are computed
later, when no stage waits (Qi et al., "Zero bubble pipeline parallelism", 2023). Everything else (norms, embeddings,
convolutions) is a small part of a stage's work and is not deferred. Torch's `stage_backward_input` and
`stage_backward_weight` are not used: they walk the whole autograd graph for every microbatch, keep all of it until the
second part, and are not a public interface.
"""

from collections import Counter
from collections.abc import Callable, Iterator
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
    """A deferred gradient: d loss / d weight is `gradient`^T `inputs`.

    `inputs` is [num_rows, in_features], `gradient` [num_rows, out_features].
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    inputs: torch.Tensor
    gradient: torch.Tensor

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class Deferral:
    """Defers the weight gradients of one stage's linear layers. `weight.grad` must exist before a gradient is deferred
    to it."""

    def __init__(self, stage: nn.Module) -> None:
        self._pending: list[_Pending] | None = None
        for module in stage.modules():
            if isinstance(module, LossHead):
                module.put_off = self.put_off
            elif isinstance(module, nn.Linear):
                module.forward = partial(_product, self, module, module.bias)
            elif isinstance(module, RowLinear):
                # Its bias is added after the sum over ranks, and is no part of the product.
                module.product = partial(_product, self, module, None)

    @contextmanager
    def collecting(self) -> Iterator[list[_Pending]]:
        """Defer the weight gradients of a backward in this context. They are collected in the list, for `compute`."""
        self._pending = []
        try:
            yield self._pending
        finally:
            self._pending = None

    @torch.no_grad()
    def compute(self, pending: list[_Pending], tell: Callable[[nn.Parameter], None] | None = None) -> None:
        """Add the deferred gradients to `weight.grad`, the oldest first, and free what they are computed from.

        `tell` is called with each parameter when the last of its deferred gradients is added.
        """
        left = Counter(own for item in pending for own in item.parameters)
        while pending:
            item = pending.pop(0)
            product = item.gradient.T @ item.inputs
            item.weight.grad.add_(product)
            if item.bias is not None:
                item.bias.grad.add_(item.gradient.sum(0))
            for parameter in item.parameters:
                left[parameter] -= 1
                if tell and not left[parameter]:
                    tell(parameter)

    def put_off(
        self, weight: nn.Parameter, bias: nn.Parameter | None, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> bool:
        """Defer one layer's gradients; returns False if they must be computed now."""
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
    """`inputs @ weight.T + bias`, whose backward defers the gradients of weight and bias if the deferral collects."""

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
