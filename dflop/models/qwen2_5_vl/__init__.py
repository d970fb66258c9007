"""Qwen2.5-VL: a vision transformer at native resolution with window attention, and an LLM with three position axes."""

from dflop.models.family import Family
from dflop.models.qwen2_5_vl.presets import PRESETS, make_spec
from dflop.models.qwen2_5_vl.shapes import Qwen25VlShapes

__all__ = ["FAMILY", "PRESETS", "Qwen25VlShapes", "make_spec"]

FAMILY = Family(name="qwen2_5_vl", presets=PRESETS, make_spec=make_spec, evaluated_as="qwen2_5_vl")
