"""Modules of the presets on a device, ready to be measured (`dflop/costs/measure.py`)."""

from copy import deepcopy

import torch

from dflop.base import UserError
from dflop.costs.measure import Bench
from dflop.models import ModelSpec, family_of, load_runtime
from tests.gpu.check import Setting

__all__ = ["bench_of", "spec_of", "why_left_out"]


def why_left_out(family: str) -> str | None:
    """Why a family's models cannot be built with the packages that are here; None if they can."""
    try:
        load_runtime(family)
    except UserError as needs:
        return str(needs)
    return None


def spec_of(family: str, preset: str, setting: Setting) -> ModelSpec:
    """The model of a preset, or the family's tiny one where sizes are tiny."""
    name = "tiny" if setting.is_tiny else preset
    return family_of(family).make_spec(name, deepcopy(family_of(family).presets[name]), {})


def bench_of(spec: ModelSpec, module: str, depth: int, setting: Setting, *, is_compiled: bool = True) -> Bench:
    """`depth` layers of a module in bf16. On CPUs they are not compiled, which would take minutes."""
    names = ("image", "video", "audio", *spec.rules.special_tokens)
    return Bench(
        spec,
        module,
        depth,
        placeholder_ids={name: place for place, name in enumerate(names)},
        vocab_size=0,
        device=torch.device(setting.device),
        precision="bf16",
        is_compiled=is_compiled and setting.device == "cuda",
    )
