"""Building and feeding InternVL: its Hugging Face config for a tokenizer, its stages, its pixels."""

from collections.abc import Mapping
from copy import deepcopy

import torch
from transformers import InternVLForConditionalGeneration

from dflop.models.internvl.presets import make_spec
from dflop.models.internvl.processing import InternvlPixels
from dflop.models.internvl.stages import cut
from dflop.models.microbatch import EncoderBatch, MediumLayout, TextBatch
from dflop.models.runtime import FamilyRuntime, MadeUpMedia
from dflop.models.spec import ModelSpec

__all__ = ["RUNTIME"]

# Checkpoints on the hub and from `save_pretrained` have the tensor names of the family's first version.
_FIRST_NAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.(model\.)?", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector)\b", r"model.\1"),
)


def with_depth(spec: ModelSpec, module: str, num_layers: int) -> ModelSpec:
    """The model with `num_layers` layers in one module."""
    fields = deepcopy(spec.hf_config)
    part = "text_config" if module == "llm" else "vision_config"
    fields[part] = fields.get(part, {}) | {"num_hidden_layers": num_layers}
    return make_spec(spec.name, fields)


def make_up_media(spec: ModelSpec, module: str, num_items: int) -> MadeUpMedia:
    """A clip of `num_items` frames: for the encoder, tiles of pictures and frames are alike."""
    side = spec.rules.image_size
    clip = (MediumLayout("video", num_items, side, side),)
    return MadeUpMedia(item_shape=(3, side, side), media=clip)


def plain_inputs(media: Mapping[str, EncoderBatch], text: TextBatch) -> dict[str, torch.Tensor]:
    """The tiles of all pictures and frames, in the order of the media."""
    return {"pixel_values": media["vision"].items} if media else {}


RUNTIME = FamilyRuntime(
    architecture=InternVLForConditionalGeneration,
    token_fields={"image_token_id": "image"},  # it stands for frames, too
    cut=cut,
    weight_renamings=_FIRST_NAMES,
    processors={"vision": InternvlPixels},
    with_depth=with_depth,
    make_up_media=make_up_media,
    plain_inputs=plain_inputs,
)
