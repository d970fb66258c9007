"""Presets: named Hugging Face config fields, and the spec that follows from such fields.

`tiny` trains in a minute on two CPU cores and keeps every trait that makes the real family uneven: any
resolution up to a 6x6 grid of crops, one crop a picture in multi-image samples, pooled video frames.
`llava_ov_{0.5b,7b,72b}` have the sizes of `llava-onevision-qwen2-{0.5b,7b,72b}-ov-hf`; `siglip_llama3_8b`
and `siglip_llama3_70b` are the same model around Llama 3, of which no checkpoint was released.
"""

from typing import Any

from dflop.base import UserError
from dflop.models.checkpoint import check_processor
from dflop.models.llava_onevision.shapes import LlavaOnevisionShapes
from dflop.models.presets import LLMS, TINY_LLM
from dflop.models.spec import ModelSpec, vision_and_llm

__all__ = ["PRESETS", "make_spec"]


def _square_grids(image_size: int, largest: int = 6) -> list[list[int]]:
    """Every grid from 1x1 to `largest` x `largest` crops, as `[height, width]` in pixels."""
    sides = [image_size * count for count in range(1, largest + 1)]
    return [[height, width] for height in sides for width in sides]


# SigLIP has 27 layers. The model reads the output of the 26th, and has no 27th.
_SIGLIP_SO400M_384 = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}


def _siglip_with(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llava_onevision",
        "vision_config": _SIGLIP_SO400M_384,
        "text_config": text,
        "image_grid_pinpoints": _square_grids(384),
        "vision_aspect_ratio": "anyres_max_9",
        "tie_word_embeddings": False,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llava_onevision",
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 84,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "text_config": TINY_LLM,
        "image_grid_pinpoints": _square_grids(84),
    },
    "llava_ov_0.5b": _siglip_with(LLMS["qwen2_0.5b"] | {"vocab_size": 152_000}) | {"tie_word_embeddings": True},
    "llava_ov_7b": _siglip_with(LLMS["qwen2_7b"] | {"vocab_size": 152_000}),
    "llava_ov_72b": _siglip_with(LLMS["qwen2_72b"] | {"vocab_size": 152_128}),
    "siglip_llama3_8b": _siglip_with(LLMS["llama3_8b"]),
    "siglip_llama3_70b": _siglip_with(LLMS["llama3_70b"]),
}

# What a config.json of the family may leave out, and the values that transformers then takes.
_VISION_DEFAULTS = {
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


def make_spec(name: str, hf_config: dict[str, Any], processor: dict[str, Any] | None = None) -> ModelSpec:
    """The spec of a model of this family from the fields of its Hugging Face config and processor.

    Raises:
        UserError: naming the field that is missing, that the family's rules cannot use, or that contradicts another.
    """
    processor = processor or {}
    vision = _VISION_DEFAULTS | hf_config.get("vision_config", {})
    pinpoints = (
        hf_config.get("image_grid_pinpoints")
        or processor.get("image_grid_pinpoints")
        or _square_grids(vision["image_size"])
    )
    side, strategy = vision["image_size"], hf_config.get("vision_feature_select_strategy", "full")
    wanted = {"size": {"height": side, "width": side}, "image_grid_pinpoints": [list(pair) for pair in pinpoints]}
    check_processor(name, processor, wanted | {"vision_feature_select_strategy": strategy})
    return ModelSpec(
        family="llava_onevision",
        name=name,
        hf_config=hf_config,
        modules=vision_and_llm(name, vision, hf_config.get("text_config", {})),
        rules=LlavaOnevisionShapes(
            image_size=vision["image_size"],
            patch_size=vision["patch_size"],
            grid_pinpoints=tuple((height, width) for height, width in pinpoints),
            max_crops=_max_crops(hf_config.get("vision_aspect_ratio", "anyres_max_9")),
        ),
    )


def _max_crops(vision_aspect_ratio: str) -> int:
    most = vision_aspect_ratio.removeprefix("anyres_max_")
    if not most.isdigit():
        raise UserError(f"the model's `vision_aspect_ratio` is {vision_aspect_ratio!r}; only `anyres_max_<n>` is known")
    return int(most)
