"""Building and feeding LLaVA-OneVision: its Hugging Face config for a tokenizer, its stages, its pixels."""

from collections.abc import Mapping
from copy import deepcopy

import torch
from transformers import LlavaOnevisionForConditionalGeneration

from dflop.models.llava_onevision.presets import make_spec
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels
from dflop.models.llava_onevision.stages import cut
from dflop.models.microbatch import EncoderBatch, MediumLayout, TextBatch
from dflop.models.runtime import FamilyRuntime, MadeUpMedia
from dflop.models.spec import ModelSpec

__all__ = ["RUNTIME"]

# Checkpoints on the hub and from `save_pretrained` have the tensor names of the family's first version.
_FIRST_NAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.(model\.)?", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector|image_newline)\b", r"model.\1"),
    (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
)


def with_depth(spec: ModelSpec, module: str, num_layers: int) -> ModelSpec:
    """The model with `num_layers` layers in one module. Features then come from the encoder's last layer."""
    fields = deepcopy(spec.hf_config)
    fields["text_config" if module == "llm" else "vision_config"]["num_hidden_layers"] = num_layers
    layer = fields.get("vision_feature_layer", -1)
    fields["vision_feature_layer"] = -1 if isinstance(layer, int) else [-1] * len(layer)
    return make_spec(spec.name, fields)


def make_up_media(spec: ModelSpec, module: str, num_items: int) -> MadeUpMedia:
    """As many pictures with a 2x2 grid of crops as fit into `num_items` items, and single crops for the rest."""
    side = spec.rules.image_size
    whole = spec.rules.image(2 * side, 2 * side, 1).num_items
    pictures = (MediumLayout("image", whole, 2 * side, 2 * side),) * (num_items // whole)
    crops = (MediumLayout("image", 1, side, side),) * (num_items % whole)
    return MadeUpMedia(item_shape=(3, side, side), media=pictures + crops)


def plain_inputs(media: Mapping[str, EncoderBatch], text: TextBatch) -> dict[str, torch.Tensor]:
    """The crops of all pictures one after the other, and the frames of clips apart from them.

    Raises:
        ValueError: for clips of several lengths, which transformers' model does not take at once.
    """
    if not media:
        return {}
    inputs, (layouts,) = {}, media["vision"].media
    items = media["vision"].items.split([medium.num_items for medium in layouts])
    pictures = [place for place, medium in enumerate(layouts) if medium.kind == "image"]
    clips = [own for own, medium in zip(items, layouts, strict=True) if medium.kind == "video"]
    if len(set(map(len, clips))) > 1:
        raise ValueError("transformers takes several clips of one sample only if they have as many frames")
    if pictures:
        inputs["pixel_values"] = torch.cat([items[place] for place in pictures])
        inputs["image_sizes"] = torch.tensor([(layouts[place].height, layouts[place].width) for place in pictures])
        inputs["batch_num_images"] = torch.tensor([len(pictures)])
    if clips:
        inputs["pixel_values_videos"] = torch.stack(clips)
    return inputs


RUNTIME = FamilyRuntime(
    architecture=LlavaOnevisionForConditionalGeneration,
    token_fields={"image_token_id": "image", "video_token_id": "video"},
    cut=cut,
    weight_renamings=_FIRST_NAMES,
    processors={"vision": LlavaOnevisionPixels},
    with_depth=with_depth,
    make_up_media=make_up_media,
    plain_inputs=plain_inputs,
)
