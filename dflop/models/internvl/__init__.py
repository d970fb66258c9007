"""InternVL: InternViT, pixel shuffle, a two-layer projector, and a Qwen2 LLM. Only its shapes are known yet."""

from dflop.models.internvl.presets import PRESETS, make_spec
from dflop.models.internvl.shapes import InternvlShapes

__all__ = ["PRESETS", "InternvlShapes", "make_spec"]
