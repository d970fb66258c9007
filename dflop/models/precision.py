"""What weights are computed in, and what else is held of them.

`bf16` is mixed precision as Megatron and FSDP have it: weights and the residual stream are bf16, norms and the loss
compute in fp32 inside, and gradients are accumulated in fp32. The optimiser holds fp32 masters of the weights that it
updates. Nothing is cast in a pass.
"""

from collections.abc import Collection

import torch
from torch import nn

__all__ = ["COMPUTES_IN", "compute_in", "held_in", "set_values"]

# By the name in the config, `train.precision`.
COMPUTES_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def held_in(dtype: torch.dtype) -> torch.dtype:
    """What gradients, masters and moments of weights are held in that are computed in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def compute_in(module: nn.Module, dtype: torch.dtype, but: Collection[nn.Parameter] = ()) -> None:
    """Turn a module's parameters, `but` for these, into `dtype`, in place; their gradients may be wider. Buffers, such
    as rotary frequencies, stay as they are."""
    left = set(but)
    for parameter in module.parameters():
        if parameter.dtype != dtype and parameter not in left:
            set_values(parameter, parameter.detach().to(dtype))


def set_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter look at `values`, of its shape and maybe of another dtype."""
    if values.dtype != parameter.dtype and parameter.requires_grad:
        parameter.grad_dtype = None  # autograd adds a gradient to what is there, whatever its dtype
    parameter.data = values
