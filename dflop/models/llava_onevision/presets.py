"""Presets: named Hugging Face config fields, and the spec that follows from such fields.

`tiny` trains in a minute on two CPU cores and keeps every trait that makes the real family uneven: any
resolution up to a 6x6 grid of crops, one crop a picture in multi-image samples, pooled video frames.
"""

from typing import Any

from dflop.errors import UserError
from dflop.models.llava_onevision.shapes import LlavaOnevisionShapes
from dflop.models.spec import ModelSpec, ModuleSpec

__all__ = ["PRESETS", "make_spec"]


def _square_grids(image_size: int, largest: int = 6) -> list[list[int]]:
    """Every grid from 1x1 to `largest` x `largest` crops, as `[height, width]` in pixels."""
    sides = [image_size * count for count in range(1, largest + 1)]
    return [[height, width] for height in sides for width in sides]


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
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
            "max_position_embeddings": 16384,
            "tie_word_embeddings": False,
        },
        "image_grid_pinpoints": _square_grids(84),
    },
}

# What a config.json of the family may leave out, and the values that transformers then takes.
_VISION_DEFAULTS = {
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


def make_spec(name: str, hf_config: dict[str, Any]) -> ModelSpec:
    """The spec of a model of this family from the fields of its Hugging Face config.

    Raises:
        UserError: naming the field that is missing.
    """
    vision = _VISION_DEFAULTS | hf_config.get("vision_config", {})
    text = hf_config.get("text_config", {})
    try:
        llm = ModuleSpec(
            name="llm",
            num_layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            num_heads=text["num_attention_heads"],
            num_kv_heads=text.get("num_key_value_heads", text["num_attention_heads"]),
        )
    except KeyError as error:
        raise UserError(f"the config of {name} has no `text_config.{error.args[0]}`") from None
    return ModelSpec(
        family="llava_onevision",
        name=name,
        hf_config=hf_config,
        modules=(
            ModuleSpec(
                name="vision",
                num_layers=vision["num_hidden_layers"],
                hidden_size=vision["hidden_size"],
                num_heads=vision["num_attention_heads"],
                num_kv_heads=vision["num_attention_heads"],
            ),
            llm,
        ),
        rules=LlavaOnevisionShapes(
            image_size=vision["image_size"],
            patch_size=vision["patch_size"],
            grid_pinpoints=tuple(
                (height, width)
                for height, width in hf_config.get("image_grid_pinpoints") or _square_grids(vision["image_size"])
            ),
            max_crops=_max_crops(hf_config.get("vision_aspect_ratio", "anyres_max_9")),
        ),
    )


def _max_crops(vision_aspect_ratio: str) -> int:
    most = vision_aspect_ratio.removeprefix("anyres_max_")
    if not most.isdigit():
        raise UserError(f"the model's `vision_aspect_ratio` is {vision_aspect_ratio!r}; only `anyres_max_<n>` is known")
    return int(most)
