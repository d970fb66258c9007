"""Qwen2.5-Omni's thinker: Qwen2.5-VL's vision encoder, a Whisper-like audio encoder, and the LLM that both feed."""

from dflop.models.family import Family
from dflop.models.qwen2_5_omni_thinker.presets import PRESETS, make_spec
from dflop.models.qwen2_5_omni_thinker.shapes import Qwen25OmniShapes

__all__ = ["FAMILY", "PRESETS", "Qwen25OmniShapes", "make_spec"]

FAMILY = Family(
    name="qwen2_5_omni_thinker",
    presets=PRESETS,
    make_spec=make_spec,
    part_of={"qwen2_5_omni": "thinker_config"},
)
