"""InternVL: InternViT, pixel shuffle, a two-layer projector, and an LLM of Qwen or Llama."""

from dflop.models.family import Family
from dflop.models.internvl.presets import PRESETS, make_spec
from dflop.models.internvl.shapes import InternvlShapes

__all__ = ["FAMILY", "PRESETS", "InternvlShapes", "make_spec"]

FAMILY = Family(
    name="internvl",
    presets=PRESETS,
    make_spec=make_spec,
    evaluated_as="internvl_hf",
    other_checkpoints={"internvl_chat": "use the checkpoint of InternVL whose name ends in -hf"},
)
