"""Presets: named Hugging Face config fields, and the spec that follows from such fields.

`tiny` has few small layers, and every trait that makes the real family uneven: up to twelve tiles by aspect
ratio, one tile of the whole picture, and fewer tiles a picture if there are several. `internvl_2b`, `internvl_8b`,
`internvl_38b` and `internvl_78b` have the sizes of `InternVL3-{2B,8B,38B,78B}-hf`: InternViT-300M (6B for the
larger two) at 448 px and Qwen2.5. Those with `llama3` are the same model around Llama 3, never released.
"""

from typing import Any

from dflop.base import UserError
from dflop.models.checkpoint import check_processor
from dflop.models.internvl.shapes import InternvlShapes
from dflop.models.presets import LLMS, TINY_LLM
from dflop.models.spec import ModelSpec, vision_and_llm

__all__ = ["PRESETS", "make_spec"]

_INTERNVIT_300M = {
    "model_type": "internvl_vision",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": True,
    "image_size": [448, 448],
    "patch_size": [14, 14],
}
# As in InternVL2.5 and InternVL3: 45 of the first version's 48 layers.
_INTERNVIT_6B = _INTERNVIT_300M | {
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "num_hidden_layers": 45,
    "num_attention_heads": 25,
    "attention_bias": False,
    "use_qk_norm": True,
    "norm_type": "rms_norm",
}


def _internvit_with(vision: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "internvl",
        "vision_config": vision,
        "text_config": text,
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "tie_word_embeddings": False,
    }


def _internvl3(vision: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """InternVL3 reduced the vocabulary to the tokens in use and its own. Its head is not tied at any size."""
    return _internvit_with(vision, text | {"vocab_size": 151_674, "tie_word_embeddings": False})


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "internvl",
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "attention_bias": True,
            "image_size": [56, 56],
            "patch_size": [14, 14],
        },
        "text_config": TINY_LLM,
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    },
    "internvl_2b": _internvl3(_INTERNVIT_300M, LLMS["qwen2.5_1.5b"]),
    "internvl_8b": _internvl3(_INTERNVIT_300M, LLMS["qwen2.5_7b"]),
    "internvl_38b": _internvl3(_INTERNVIT_6B, LLMS["qwen2.5_32b"]),
    "internvl_78b": _internvl3(_INTERNVIT_6B, LLMS["qwen2.5_72b"]),
    "internvit_300m_llama3_8b": _internvit_with(_INTERNVIT_300M, LLMS["llama3_8b"]),
    "internvit_6b_llama3_70b": _internvit_with(_INTERNVIT_6B, LLMS["llama3_70b"]),
}

# What a config.json of the family may leave out, and the values that transformers then takes.
_VISION_DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}


def make_spec(name: str, hf_config: dict[str, Any], processor: dict[str, Any] | None = None) -> ModelSpec:
    """The spec of a model of this family from the fields of its Hugging Face config and processor.

    The image processor's `crop_to_patches` does not matter: InternVL's processor always asks for tiles.

    Raises:
        UserError: naming the field that is missing, that the family's rules cannot use, or that contradicts another.
    """
    processor = processor or {}
    vision = _VISION_DEFAULTS | hf_config.get("vision_config", {})
    image_size, patch_size = (_side_of(vision, key, name) for key in ("image_size", "patch_size"))
    downsample_ratio = hf_config.get("downsample_ratio", 0.5)
    patches = image_size // patch_size
    if patches * downsample_ratio % 1:
        raise UserError(
            f"the config of {name} has {patches} patches a side and `downsample_ratio` {downsample_ratio}: "
            f"{patches * downsample_ratio:g} are left, which must be a whole number"
        )
    for key, usual in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
        if hf_config.get(key, usual) != usual:
            raise UserError(f"the config of {name} has `{key}` {hf_config[key]!r}; only {usual!r} is known")
    rules = InternvlShapes(
        image_size=image_size,
        patch_size=patch_size,
        downsample_ratio=downsample_ratio,
        min_tiles=_whole_number(processor, "min_patches", 1, name),
        max_tiles=_whole_number(processor, "max_patches", 12, name),
    )
    sequence = {"image_seq_length": rules.tokens_per_tile}
    check_processor(name, processor, {"size": {"height": image_size, "width": image_size}} | sequence)
    return ModelSpec(
        family="internvl",
        name=name,
        hf_config=hf_config,
        modules=vision_and_llm(name, vision, hf_config.get("text_config", {})),
        rules=rules,
    )


def _side_of(vision: dict[str, Any], key: str, name: str) -> int:
    """The side of a square in pixels, which InternVL's configs give as a number or as a pair."""
    sides = vision[key] if isinstance(vision[key], list) else [vision[key]]
    if len(set(sides)) != 1:
        raise UserError(f"the config of {name} has `vision_config.{key}` {vision[key]}; only squares are known")
    return sides[0]


def _whole_number(processor: dict[str, Any], key: str, default: int, name: str) -> int:
    number = processor.get(key, default)
    if not isinstance(number, int):
        raise UserError(f"the image processor of {name} has `{key}` {number!r}; it must be a whole number")
    return number
