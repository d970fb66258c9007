"""Building and feeding Qwen2.5-VL: its Hugging Face config for a tokenizer, its stages, its patches."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from dflop.models.microbatch import EncoderBatch, MediumLayout, TextBatch
from dflop.models.qwen2_5_vl.layout import lay_out
from dflop.models.qwen2_5_vl.presets import make_spec
from dflop.models.qwen2_5_vl.processing import Qwen25VlPatches
from dflop.models.qwen2_5_vl.stages import cut
from dflop.models.runtime import FamilyRuntime, MadeUpMedia
from dflop.models.spec import ModelSpec

__all__ = ["RUNTIME", "fields_with_depth", "make_up_media", "plain_inputs"]

# Checkpoints on the hub and from `save_pretrained` have the tensor names of the family's first version.
_FIRST_NAMES = (
    (r"^visual\.", "model.visual."),
    (r"^model\.(?!language_model\.|visual\.)", "model.language_model."),
)
# The sides of small and large made-up pictures, in items. Both are used, so that `sum_sq_items` is not a function of
# the number of items. The small ones have the size of the released models' windows.
_SIDES = (4, 32)


def with_depth(spec: ModelSpec, module: str, num_layers: int) -> ModelSpec:
    """The model with `num_layers` layers in one module. In the encoder, none of these has window attention, so that any
    one of them can be measured; small pictures take the place of windows (`make_up_media`)."""
    return make_spec(spec.name, fields_with_depth(spec, module, num_layers))


def fields_with_depth(spec: ModelSpec, module: str, num_layers: int) -> dict[str, Any]:
    """The config's fields, with `num_layers` layers in the vision encoder or the LLM, as `with_depth` wants them."""
    fields = deepcopy(spec.hf_config)
    if module == "llm":
        fields["text_config"]["num_hidden_layers"] = num_layers
    else:
        fields["vision_config"] |= {"depth": num_layers, "fullatt_block_indexes": list(range(num_layers))}
    return fields


def make_up_media(spec: ModelSpec, module: str, num_items: int) -> MadeUpMedia:
    """Square pictures, small or large depending on the number of items, and a few oblong ones for the rest."""
    rules = spec.rules
    most, grids, left = _SIDES[num_items.bit_length() % 2], [], num_items
    while left:
        rows = min(most, math.isqrt(left))
        columns = min(most, left // rows)
        grids.append((1, rows * rules.merge_size, columns * rules.merge_size))
        left -= rows * columns
    media = tuple(
        MediumLayout(
            "image",
            math.prod(grid) // rules.merge_size**2,
            grid[1] * rules.patch_size,
            grid[2] * rules.patch_size,
            grid,
        )
        for grid in grids
    )
    return MadeUpMedia(
        item_shape=(rules.merge_size**2, 3 * rules.temporal_patch_size * rules.patch_size**2),
        media=media,
        sum_sq_items=sum(rules.sum_sq_items(grid) for grid in grids),
    )


def plain_inputs(media: Mapping[str, EncoderBatch], text: TextBatch) -> dict[str, torch.Tensor]:
    """The patches and grids of pictures and, apart from them, of clips, and which tokens belong to which of the two."""
    if not media:
        return {}
    inputs, token_types, (layouts,) = {}, torch.zeros_like(text.token_ids), media["vision"].media
    items = media["vision"].items.split([medium.num_items for medium in layouts])
    positions = text.feature_positions[0].split([medium.num_items for medium in layouts])
    for kind, type_id, suffix in (("image", 1, ""), ("video", 2, "_videos")):
        own = [place for place, medium in enumerate(layouts) if medium.kind == kind]
        if own:
            inputs[f"pixel_values{suffix}"] = torch.cat([items[place] for place in own]).flatten(0, 1)
            inputs[f"{kind}_grid_thw"] = torch.tensor([layouts[place].grid for place in own])
            token_types[torch.cat([positions[place] for place in own])] = type_id
    frames_s = [medium.frame_s for medium in layouts if medium.kind == "video"]
    if frames_s:
        inputs["second_per_grid_ts"] = 2 * torch.tensor(frames_s)  # two frames are one step
    return inputs | {"mm_token_type_ids": token_types[None]}


RUNTIME = FamilyRuntime(
    architecture=Qwen2_5_VLForConditionalGeneration,
    token_fields={"image_token_id": "image", "video_token_id": "video"},
    cut=cut,
    weight_renamings=_FIRST_NAMES,
    packs_media=True,
    processors={"vision": Qwen25VlPatches},
    layouts={"vision": lay_out},
    with_depth=with_depth,
    make_up_media=make_up_media,
    plain_inputs=plain_inputs,
)
