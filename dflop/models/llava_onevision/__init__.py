"""LLaVA-OneVision: SigLIP, a two-layer projector, and a Qwen2 LLM."""

from dflop.models.family import Family
from dflop.models.llava_onevision.presets import PRESETS, make_spec
from dflop.models.llava_onevision.shapes import LlavaOnevisionShapes

__all__ = ["FAMILY", "PRESETS", "LlavaOnevisionShapes", "make_spec"]

FAMILY = Family(name="llava_onevision", presets=PRESETS, make_spec=make_spec, evaluated_as="llava_hf")
