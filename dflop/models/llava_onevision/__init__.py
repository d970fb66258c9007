"""LLaVA-OneVision: SigLIP, a two-layer projector, and a Qwen2 LLM."""

from dflop.models.llava_onevision.presets import PRESETS, make_spec
from dflop.models.llava_onevision.shapes import LlavaOnevisionShapes

__all__ = ["PRESETS", "LlavaOnevisionShapes", "make_spec"]
