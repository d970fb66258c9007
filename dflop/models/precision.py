"""The dtypes of weights, and of their gradients and optimiser states.

`bf16` is mixed precision as in Megatron and FSDP: weights and the residual stream are bf16, norms and the loss compute
in fp32 internally, and gradients are accumulated in fp32. The optimiser holds fp32 masters of the weights that it
updates. Weights are not cast during a pass.
"""

from collections.abc import Collection

import torch
from torch import nn

__all__ = ["COMPUTES_IN", "compute_in", "held_in", "set_values"]

# The dtype of weights, by the value of `train.precision`.
COMPUTES_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def held_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the gradients, masters and moments of weights that are of type `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def compute_in(module: nn.Module, dtype: torch.dtype, but: Collection[nn.Parameter] = ()) -> None:
    """Convert a module's parameters, except those in `but`, to `dtype` in place. Their gradients may be wider. Buffers,
    such as rotary frequencies, stay as they are."""
    left = set(but)
    for parameter in module.parameters():
        if parameter.dtype != dtype and parameter not in left:
            set_values(parameter, parameter.detach().to(dtype))


def set_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Make `values` the data of a parameter, without a copy. They have its shape, and may have another dtype."""
    if values.dtype != parameter.dtype and parameter.requires_grad:
        parameter.grad_dtype = None  # autograd adds a gradient to what is there, whatever its dtype
    parameter.data = values
