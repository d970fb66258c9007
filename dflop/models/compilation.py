"""Layers compiled by torch.compile: it fuses pointwise operations, such as norms and gated activations.

Each layer is compiled by itself, for any number of tokens. Packed attention is not compiled: a layer becomes one
compiled piece before it and one after it. Hooks that gather a layer's parameters, and activation checkpointing, stay
outside the compiled code.

Between forward and backward, a compiled layer keeps the results of matrix products and attention alone. Pointwise ones
(norms, activations) are computed again in backward, inside the kernels that read them: a layer of Qwen2-7B then keeps
28 % less, and takes 0.5 % longer. A recomputed layer has them at hand, and keeps what torch keeps. Its last matrix
product is not compiled: no backward reads the result, so checkpointing ends the recomputation ahead of the product.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch_config
from transformers import AttentionInterface

from dflop.base.artifacts import temporary_folder
from dflop.base.compilers import COMPILERS, find_compiler
from dflop.models.adapter_files import is_adapter
from dflop.models.attention import PACKED, packed_attention
from dflop.models.compile_log import keep_log, why_not_compiled
from dflop.models.stages import Stage
from dflop.models.tensor_parallel import RowLinear

__all__ = ["RECOMPUTES_POINTWISE", "compile_layers", "compiles_layers", "recomputing_pointwise", "replace_forwards"]

# All layers of a kind share graphs, but there are some for each of: training and evaluation, recomputed or not, frozen
# or not, one position or many. Five of these modes make 22, and torch gives up at 8 by default.
_MOST_GRAPHS = 64
# For torch's partitioner: results of pointwise operations may be computed again in backward, whoever reads them there.
RECOMPUTES_POINTWISE = {
    f"ban_recompute_{which}": False for which in ("materialized_backward", "used_far_apart", "long_fusible_chains")
}

_Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
_Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def compiles_layers(wanted: str, device: torch.device) -> tuple[bool, str | None]:
    """Whether `train.compile` (auto, on, off) means that layers are compiled on this device. The second value is a
    warning, if they should be but cannot."""
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return False, None
    # torch would take a folder of a known name in the temporary folder, whoever made it, and run what it finds there.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(temporary_folder() / "compiled"))
    if missing := _missing_compiler(device):
        return False, f"`train.compile` is '{wanted}', and torch.compile finds no {missing}: layers stay eager"
    if reason := why_not_compiled(device):
        return False, f"`train.compile` is '{wanted}', and torch.compile fails ({reason}): layers stay eager"
    return True, None


def compile_layers(stage: Stage, backend: str | _Backend = "inductor") -> None:
    """Have a stage's layers compiled, each when it first runs. A layer that cannot be compiled stays eager."""
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    keep_log()
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    replace_forwards(
        stage,
        partial(torch.compile, dynamic=True, backend=recomputing_pointwise(backend)),
        partial(torch.compile, dynamic=True, backend=backend),
    )


def recomputing_pointwise(backend: str | _Backend) -> _Backend:
    """The backend of torch.compile with graphs that compute pointwise results again in backward."""
    compile_graph = lookup_backend(backend)

    def compile_recomputing(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with functorch_config.patch(RECOMPUTES_POINTWISE):
            return compile_graph(graph, inputs)

    return compile_recomputing


def replace_forwards(stage: Stage, compiler: _Compiler, of_recomputed: _Compiler | None = None) -> None:
    """Put `compiler(forward)` in the place of the bound method `forward` of each layer of a stage; where the layer is
    recomputed as a whole, `of_recomputed(forward)`."""
    for name in stage.layer_names:
        layer = stage.hf.get_submodule(name)
        layer.forward = _compiled_forward(layer, compiler, of_recomputed or compiler)


def _compiled_forward(layer: nn.Module, compiler: _Compiler, of_recomputed: _Compiler) -> Callable[..., Any]:
    """The layer's forward, compiled inside activation checkpointing."""
    forward, checkpoints_outside = type(layer).forward, True
    # transformers wraps the forward of each class of layers, and each class that torch derives from it, once more.
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward, checkpoints_outside = forward.__wrapped__, False
    kept, recomputed = compiler(forward.__get__(layer)), of_recomputed(forward.__get__(layer))
    *_, last = (own for name, own in layer.named_modules() if _is_product(own) and not is_adapter(f"{name}.weight"))
    last.forward = _outside_where(lambda: is_recomputed(), last.forward)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        with _wide_gradients_aside(layer):
            return (recomputed if is_recomputed() else kept)(*args, **kwargs)

    def is_recomputed() -> bool:
        return layer.gradient_checkpointing and layer.training

    def run(*args: Any, **kwargs: Any) -> Any:
        if checkpoints_outside or not is_recomputed():
            return compiled(*args, **kwargs)
        return layer._gradient_checkpointing_func(partial(compiled, **kwargs), *args)

    return run


def _is_product(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, RowLinear))


def _outside_where(is_outside: Callable[[], bool], forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is not compiled where `is_outside()`."""
    outside = torch.compiler.disable(forward)

    def run(hidden: torch.Tensor) -> torch.Tensor:
        return outside(hidden) if is_outside() else forward(hidden)

    return run


@contextmanager
def _wide_gradients_aside(layer: nn.Module) -> Iterator[None]:
    """Without the gradients that are of another dtype than their weights, such as fp32 ones of bf16 weights, which
    torch.compile cannot trace: it would split the layer at each weight that has one."""
    aside = [
        (parameter, gradient)
        for parameter in layer.parameters()
        if (gradient := parameter.grad) is not None and gradient.dtype != parameter.dtype
    ]
    for parameter, _ in aside:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient


def _missing_compiler(device: torch.device) -> str | None:
    if device.type == "cuda" and not importlib.util.find_spec("triton"):
        return "package triton"
    variable, language = ("CC", "C") if device.type == "cuda" else ("CXX", "C++")
    tried = os.environ.get(variable) or ", ".join(COMPILERS[variable])
    return None if find_compiler(variable) else f"{language} compiler ({tried})"
