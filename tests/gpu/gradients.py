"""Gradients of every family's tiny stages in bf16, with each attention kernel, against fp64 on the CPU.

The weights, inputs and output gradients of both are the same numbers of bf16, so that only computing differs. Weights
are as wide as those of real models: much larger ones make losses that bf16 cannot follow, on a CPU either.
"""

import importlib.util
import sys
from collections.abc import Iterator

import torch
from stage_cases import Case, build, forward

from dflop.models import attention, family_names
from dflop.models.stages import Stage
from tests.gpu.benches import why_left_out
from tests.gpu.check import Figures, Setting

__all__ = ["attention_kernels", "of_all_families"]

_NOISE = 0.02

_FLASH = ("flash_attn_interface", "flash_attn")


def of_all_families(setting: Setting) -> Figures:
    device, figures = torch.device(setting.device), {}
    families = family_names()[-2:-1] if setting.is_tiny else family_names()
    for kernel in attention_kernels(setting.device):
        for family in families:
            if reason := why_left_out(family):
                figures[f"left out: {family}"] = reason
                continue
            for module in [own.name for own in Case(family=family).spec.modules]:
                case = Case(family=family, module=module, precision="bf16", noise=_NOISE)
                ours = _passes(case, build(case).to(device))
                expected = _passes(case, build(case).double())
                name = f"{family} {module}, {kernel}"
                figures[f"gradients of {name}"] = _apart(ours[1], expected[1])
                figures[f"{'loss' if module == 'llm' else 'output'} of {name}"] = _apart(ours[0], expected[0])
    return figures


def attention_kernels(device: str) -> Iterator[str]:
    """The names of the kernels of packed attention here, each while it is the one that is used."""
    yield "the kernel in use"
    if device != "cuda" or not any(map(importlib.util.find_spec, _FLASH)):
        return  # it was torch's own
    hidden = {name: sys.modules.pop(name, None) for name in _FLASH}
    sys.modules |= dict.fromkeys(_FLASH)  # None: as if it were not installed
    attention._flash_attention.cache_clear()
    yield "torch's kernel"
    for name, module in hidden.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    attention._flash_attention.cache_clear()


def _passes(case: Case, stage: Stage) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs and the gradients of the input and of all parameters, in fp64 on the CPU."""
    generator = torch.Generator().manual_seed(2)
    parameter = next(stage.parameters())

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(torch.bfloat16).to(parameter.device, parameter.dtype)

    for own in stage.parameters():
        own.grad = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
    inputs, outputs = forward(case, stage, draw)
    torch.autograd.backward(outputs, [draw(*output.shape).to(output.dtype) for output in outputs])
    gradients = [inputs.grad, *(own.grad for own in stage.parameters())]
    return [_here(own) for own in outputs], [_here(own) for own in gradients]


def _here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _apart(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The norm of all differences, beside that of what is expected."""
    apart = sum(float((own - theirs).square().sum()) for own, theirs in zip(ours, expected, strict=True))
    return (apart / sum(float(theirs.square().sum()) for theirs in expected)) ** 0.5
