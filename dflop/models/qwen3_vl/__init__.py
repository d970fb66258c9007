"""Qwen3-VL: a vision transformer at native resolution, and an LLM whose early layers take further features from it."""

from dflop.models.family import Family
from dflop.models.qwen3_vl.presets import PRESETS, make_spec
from dflop.models.qwen3_vl.shapes import Qwen3VlShapes

__all__ = ["FAMILY", "PRESETS", "Qwen3VlShapes", "make_spec"]

FAMILY = Family(
    name="qwen3_vl",
    presets=PRESETS,
    make_spec=make_spec,
    evaluated_as="qwen3_vl",
    other_checkpoints={
        "qwen3_vl_moe": "of Qwen3-VL, dense models are known, none with experts: use Qwen3-VL-2B, 4B, 8B or 32B",
    },
)
