"""LLaVA-OneVision to be run: its Hugging Face config for a tokenizer, its stages, its pixels."""

from copy import deepcopy

from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

from dflop.models.llava_onevision.presets import make_spec
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels
from dflop.models.llava_onevision.stages import cut
from dflop.models.microbatch import MediumLayout
from dflop.models.runtime import FamilyRuntime, MadeUpMedia, config_fields
from dflop.models.spec import ModelSpec

__all__ = ["RUNTIME", "make_config"]

# The hub and `save_pretrained` keep the names that the family had first.
_FIRST_NAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.(model\.)?", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector|image_newline)\b", r"model.\1"),
    (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
)


def make_config(spec: ModelSpec, placeholder_ids: dict[str, int], vocab_size: int) -> LlavaOnevisionConfig:
    """The Hugging Face config for a tokenizer: its placeholder ids, and a vocabulary that holds all its tokens."""
    config = LlavaOnevisionConfig(**config_fields(spec, vocab_size))
    config.image_token_id = placeholder_ids["image"]
    config.video_token_id = placeholder_ids["video"]
    return config


def with_depth(spec: ModelSpec, module: str, num_layers: int) -> ModelSpec:
    """The model with so many layers in one module, whose features come from the last layer then."""
    fields = deepcopy(spec.hf_config)
    fields["text_config" if module == "llm" else "vision_config"]["num_hidden_layers"] = num_layers
    layer = fields.get("vision_feature_layer", -1)
    fields["vision_feature_layer"] = -1 if isinstance(layer, int) else [-1] * len(layer)
    return make_spec(spec.name, fields)


def make_up_media(spec: ModelSpec, module: str, num_items: int) -> MadeUpMedia:
    """Pictures of a 2x2 grid of crops, and single crops, that make up the number of items."""
    side = spec.rules.image_size
    whole = spec.rules.image(2 * side, 2 * side, 1).num_items
    pictures = (MediumLayout("image", whole, 2 * side, 2 * side),) * (num_items // whole)
    crops = (MediumLayout("image", 1, side, side),) * (num_items % whole)
    return MadeUpMedia(item_shape=(3, side, side), media=pictures + crops)


RUNTIME = FamilyRuntime(
    architecture=LlavaOnevisionForConditionalGeneration,
    make_config=make_config,
    cut=cut,
    weight_renamings=_FIRST_NAMES,
    make_processor=LlavaOnevisionPixels,
    with_depth=with_depth,
    make_up_media=make_up_media,
)
