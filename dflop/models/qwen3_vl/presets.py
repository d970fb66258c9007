"""Presets: named Hugging Face config fields, and the spec that follows from such fields.

`tiny` has few small layers and large patches, and every trait of the real family: pictures of any size, three position
axes, and features of several of the encoder's layers that enter several of the LLM's. The others have the sizes of
`Qwen3-VL-{2B,4B,8B,32B}-Instruct`.
"""

from typing import Any

from dflop.base import UserError
from dflop.models.checkpoint import check_output_width, check_processor
from dflop.models.presets import TINY_LLM
from dflop.models.qwen2_5_vl.presets import VISION_NAMES, pixel_limits, renamed, usual_names
from dflop.models.qwen2_5_vl.shapes import PixelLimits
from dflop.models.qwen3_vl.shapes import Qwen3VlShapes
from dflop.models.spec import ModelSpec, vision_and_llm

__all__ = ["CLIP", "PICTURE", "PRESETS", "make_spec", "spec_of"]

# What a config.json of the family may leave out, and the values that transformers then takes.
_VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_LARGE_VISION = _VISION_DEFAULTS | {"model_type": "qwen3_vl_vision"}
_SMALL_VISION = _LARGE_VISION | {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}


def _text(sections: list[int], **sizes: int) -> dict[str, Any]:
    """The fields of a Qwen3 LLM with three interleaved position axes; `sections` are the numbers of frequencies of each
    axis."""
    rope = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_interleaved": True, "mrope_section": sections}
    return {"model_type": "qwen3_vl_text", **sizes, "rms_norm_eps": 1e-6, "rope_parameters": rope}


def _qwen(vision: dict[str, Any], *, tied: bool = False, **sizes: int) -> dict[str, Any]:
    kept = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 262_144}
    return {
        "model_type": "qwen3_vl",
        "vision_config": vision | {"out_hidden_size": sizes["hidden_size"]},
        "text_config": _text([24, 20, 20], **sizes, **kept),
        "tie_word_embeddings": tied,
    }


_TINY_SIZES = {key: value for key, value in TINY_LLM.items() if key not in ("model_type", "tie_word_embeddings")}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3_vl",
        "vision_config": _LARGE_VISION
        | {
            "depth": 4,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": 32,
            "num_position_embeddings": 64,
            "out_hidden_size": TINY_LLM["hidden_size"],
            "deepstack_visual_indexes": [0, 1, 2],
        },
        "text_config": _text([6, 5, 5], **_TINY_SIZES, head_dim=32) | {"bos_token_id": None, "eos_token_id": None},
        "tie_word_embeddings": False,
    },
    "qwen3_vl_2b": _qwen(
        _SMALL_VISION,
        tied=True,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
    ),
    "qwen3_vl_4b": _qwen(
        _SMALL_VISION,
        tied=True,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
    ),
    "qwen3_vl_8b": _qwen(
        _LARGE_VISION,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
    ),
    "qwen3_vl_32b": _qwen(
        _LARGE_VISION,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
    ),
}

# The limits of the released checkpoints' processors, for checkpoints that set none.
PICTURE, CLIP = PixelLimits(256 * 256, 4096 * 4096), PixelLimits(64 * 64, 24 * 1024 * 1024)
_MAX_FRAME_TOKENS = 768


def make_spec(name: str, hf_config: dict[str, Any], processor: dict[str, Any] | None = None) -> ModelSpec:
    """The spec of a model of this family from the fields of its Hugging Face config and processor.

    Raises:
        UserError: naming the field that is missing, that the family's rules cannot use, or that contradicts another.
    """
    spec = spec_of(name, hf_config, processor or {})
    vision, text = spec.hf_config["vision_config"], spec.hf_config["text_config"]
    indexes = vision["deepstack_visual_indexes"]
    if sorted(set(indexes)) != list(indexes) or not set(indexes) <= set(range(vision["depth"])):
        raise UserError(
            f"the config of {name} has `vision_config.deepstack_visual_indexes` {list(indexes)}; they must be layers "
            f"of the {vision['depth']} from 0 on, each once and in order"
        )
    if len(indexes) > text["num_hidden_layers"]:
        raise UserError(
            f"the config of {name} has {len(indexes)} `vision_config.deepstack_visual_indexes`, but its LLM has "
            f"`num_hidden_layers` {text['num_hidden_layers']} to take their features"
        )
    check_output_width(name, "vision_config.out_hidden_size", vision["out_hidden_size"], text)
    return spec


def spec_of(name: str, hf_config: dict[str, Any], processor: dict[str, Any]) -> ModelSpec:
    """As `make_spec`, but without checking that the vision encoder and the LLM fit each other."""
    vision = _VISION_DEFAULTS | renamed(hf_config.get("vision_config", {}), VISION_NAMES)
    text = hf_config.get("text_config", {})
    fields = {"tie_word_embeddings": False} | hf_config | {"vision_config": vision, "text_config": text}
    of_clips = processor.get("video_processor", {})
    rules = Qwen3VlShapes(
        patch_size=vision["patch_size"],
        merge_size=vision["spatial_merge_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        picture=pixel_limits(processor, PICTURE, name),
        clip=pixel_limits(of_clips, CLIP, name),
        max_frame_tokens=(of_clips.get("max_video_tokens") or _MAX_FRAME_TOKENS)
        if of_clips.get("cap_pixels_per_frame")
        else None,
    )
    sizes = {"patch_size": rules.patch_size, "temporal_patch_size": rules.temporal_patch_size}
    check_processor(name, processor, sizes | {"merge_size": rules.merge_size})
    return ModelSpec(
        family="qwen3_vl",
        name=name,
        hf_config=fields,
        modules=vision_and_llm(name, vision | usual_names(vision, VISION_NAMES), text),
        rules=rules,
        num_deepstack=len(vision["deepstack_visual_indexes"]),
    )
