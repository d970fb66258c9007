"""Building and feeding Qwen3-VL: its Hugging Face config for a tokenizer, its stages, its patches."""

from collections.abc import Mapping
from copy import deepcopy

import torch
from transformers import Qwen3VLForConditionalGeneration

from dflop.models.microbatch import EncoderBatch, TextBatch
from dflop.models.qwen2_5_vl.runtime import make_up_media
from dflop.models.qwen2_5_vl.runtime import plain_inputs as plain_patches
from dflop.models.qwen3_vl.layout import lay_out
from dflop.models.qwen3_vl.presets import spec_of
from dflop.models.qwen3_vl.processing import Qwen3VlPatches
from dflop.models.qwen3_vl.stages import cut
from dflop.models.runtime import FamilyRuntime
from dflop.models.spec import ModelSpec

__all__ = ["RUNTIME"]


def with_depth(spec: ModelSpec, module: str, num_layers: int) -> ModelSpec:
    """The model with `num_layers` layers in one module. All of the encoder's features are then taken from its first
    layer, so that the mergers have the same work behind any number of these layers."""
    fields = deepcopy(spec.hf_config)
    if module == "llm":
        fields["text_config"]["num_hidden_layers"] = num_layers
    else:
        fields["vision_config"] |= {"depth": num_layers, "deepstack_visual_indexes": [0] * spec.num_deepstack}
    return spec_of(spec.name, fields, {})


def plain_inputs(media: Mapping[str, EncoderBatch], text: TextBatch) -> dict[str, torch.Tensor]:
    """As for Qwen2.5-VL, without the times of frames, which are in the text."""
    given = plain_patches(media, text)
    given.pop("second_per_grid_ts", None)
    return given


RUNTIME = FamilyRuntime(
    architecture=Qwen3VLForConditionalGeneration,
    token_fields={"image_token_id": "image", "video_token_id": "video"}
    | {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
    cut=cut,
    packs_media=True,
    processors={"vision": Qwen3VlPatches},
    layouts={"vision": lay_out},
    with_depth=with_depth,
    make_up_media=make_up_media,
    plain_inputs=plain_inputs,
)
