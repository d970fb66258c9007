"""Layers made by torch.compile: pointwise operations, such as norms and gated activations, become few kernels.

Each layer is compiled by itself, for any number of tokens. Attention over segments stays as it is, a kernel of its own:
a layer becomes one piece before it and one behind it. What goes on around a layer stays outside: hooks that gather its
parameters, and activation checkpointing.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from dflop.models.attention import PACKED, SegmentEnds, packed_attention
from dflop.models.stages import Stage

__all__ = ["compile_layers", "compiles_layers"]


def compiles_layers(wanted: str, device: torch.device) -> tuple[bool, str | None]:
    """Whether `train.compile` (auto, on, off) has layers compiled on this device, and what to say if they cannot be."""
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return False, None
    missing = _missing_compiler(device)
    if missing is None:
        return True, None
    return False, f"`train.compile` is '{wanted}', and torch.compile finds no {missing}: layers stay eager"


def compile_layers(stage: Stage) -> None:
    """Have a stage's layers compiled, each when it first runs; a layer that cannot be compiled stays as it is.

    The backward of a compiled layer is one piece: for schedules that split it layers must stay as they are.
    """
    torch._dynamo.config.suppress_errors = True
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    for name in stage.layer_names:
        layer = stage.hf.get_submodule(name)
        layer.forward = _compiled_forward(layer)


def _compiled_forward(layer: nn.Module) -> Callable[..., Any]:
    """The layer's forward, compiled inside of activation checkpointing."""
    forward, checkpoints_outside = type(layer).forward, True
    # transformers wraps the forward of each class of layers, and each class that torch derives from it, once more.
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward, checkpoints_outside = forward.__wrapped__, False
    compiled = torch.compile(forward.__get__(layer), dynamic=True)

    def run(*args: Any, segment_ends: list[int] | None = None, **kwargs: Any) -> Any:
        if segment_ends is not None:
            # The numbers of a list would be compiled in, and each new list would have the layer compiled once more.
            kwargs["segment_ends"] = SegmentEnds(segment_ends)
        if checkpoints_outside or not (layer.gradient_checkpointing and layer.training):
            return compiled(*args, **kwargs)
        return layer._gradient_checkpointing_func(partial(compiled, **kwargs), *args)

    return run


def _missing_compiler(device: torch.device) -> str | None:
    if device.type == "cuda":
        return None if importlib.util.find_spec("triton") else "package triton"
    compiler = os.environ.get("CXX") or "g++"
    return None if shutil.which(compiler) else f"C++ compiler ({compiler})"
