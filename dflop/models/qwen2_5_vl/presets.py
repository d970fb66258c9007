"""Presets: named Hugging Face config fields, and the spec that follows from such fields.

`tiny` has few small layers and large patches, and every trait that makes the real family uneven: pictures of any size,
window attention with full attention between, three position axes. The others have the sizes of
`Qwen2.5-VL-{3B,7B,32B,72B}-Instruct`.
"""

from typing import Any

from dflop.base import UserError
from dflop.models.checkpoint import check_output_width, check_processor
from dflop.models.presets import LLMS, TINY_LLM
from dflop.models.qwen2_5_vl.shapes import PixelLimits, Qwen25VlShapes
from dflop.models.spec import ModelSpec, vision_and_llm

__all__ = [
    "FRAME",
    "PICTURE",
    "PRESETS",
    "QWEN_3B",
    "TINY_VISION",
    "VISION_DEFAULTS",
    "VISION_NAMES",
    "make_spec",
    "pixel_limits",
    "renamed",
    "usual_names",
    "with_axes",
]

# What a config.json of the family may leave out, and the values that transformers then takes.
VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 4,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_VISION = VISION_DEFAULTS | {
    "model_type": "qwen2_5_vl_vision",
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "tokens_per_second": 2,
}
TINY_VISION = {
    "depth": 4,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_heads": 4,
    "patch_size": 28,
    "out_hidden_size": TINY_LLM["hidden_size"],
    "fullatt_block_indexes": [1, 3],
}
# Aliases that transformers accepts for fields.
VISION_NAMES = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}


def with_axes(text: dict[str, Any], sections: list[int]) -> dict[str, Any]:
    """The fields of a Qwen2 LLM, with three position axes; `sections` are the numbers of frequencies of each axis."""
    fields = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": sections}
    return fields | {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}


def _qwen(text: dict[str, Any], vision: dict[str, Any] | None = None, *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl",
        "vision_config": _VISION | {"out_hidden_size": text["hidden_size"]} | (vision or {}),
        "text_config": with_axes(text, [16, 24, 24]) | {"max_position_embeddings": 128_000, "rms_norm_eps": 1e-6},
        "tie_word_embeddings": tied,
    }


QWEN_3B = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen2_5_vl",
        "vision_config": _VISION | TINY_VISION,
        "text_config": with_axes(TINY_LLM, [4, 6, 6]) | {"bos_token_id": None, "eos_token_id": None},
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl_3b": _qwen(QWEN_3B, {"intermediate_size": 3420}, tied=True),
    "qwen2_5_vl_7b": _qwen(LLMS["qwen2.5_7b"], {"intermediate_size": 3420}),
    "qwen2_5_vl_32b": _qwen(LLMS["qwen2.5_32b"]),
    "qwen2_5_vl_72b": _qwen(LLMS["qwen2.5_72b"]),
}

# Fields of the LLM, which released checkpoints have at the top level of their config, and not in a `text_config`.
_TEXT_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "attention_dropout"),
    *("rope_parameters", "rope_scaling", "rope_theta", "bos_token_id", "eos_token_id", "pad_token_id"),
)
# The defaults of transformers' processors, for checkpoints that set none.
PICTURE, FRAME = PixelLimits(56 * 56, 28 * 28 * 1280), PixelLimits(128 * 28 * 28, 28 * 28 * 768)


def make_spec(name: str, hf_config: dict[str, Any], processor: dict[str, Any] | None = None) -> ModelSpec:
    """The spec of a model of this family from the fields of its Hugging Face config and processor.

    Raises:
        UserError: naming the field that is missing, that the family's rules cannot use, or that contradicts another.
    """
    processor = processor or {}
    fields = _in_sections(hf_config)
    vision, text = VISION_DEFAULTS | fields["vision_config"], fields["text_config"]
    if text.get("use_sliding_window"):
        raise UserError(f"the config of {name} has `use_sliding_window`: true; only attention to all tokens is known")
    full_layers = set(vision["fullatt_block_indexes"]) & set(range(vision["depth"]))
    rules = Qwen25VlShapes(
        patch_size=vision["patch_size"],
        merge_size=vision["spatial_merge_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        window_size=vision["window_size"],
        tokens_per_second=vision["tokens_per_second"],
        num_layers=vision["depth"],
        num_full_layers=len(full_layers),
        picture=pixel_limits(processor, PICTURE, name),
        frame=pixel_limits(processor.get("video_processor", {}), FRAME, name),
    )
    sizes = {"patch_size": rules.patch_size, "temporal_patch_size": rules.temporal_patch_size}
    check_processor(name, processor, sizes | {"merge_size": rules.merge_size})
    check_output_width(name, "vision_config.out_hidden_size", vision["out_hidden_size"], text)
    return ModelSpec(
        family="qwen2_5_vl",
        name=name,
        hf_config=fields,
        modules=vision_and_llm(name, vision | usual_names(vision, VISION_NAMES), text),
        rules=rules,
    )


def _in_sections(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config with a `text_config`, which the configs of released checkpoints lack."""
    fields = {key: value for key, value in hf_config.items() if key not in _TEXT_FIELDS}
    text = hf_config.get("text_config")
    if text is None:
        text = {key: hf_config[key] for key in _TEXT_FIELDS if key in hf_config}
    text = {"model_type": "qwen2_5_vl_text"} | text
    is_tied = hf_config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    vision = renamed(hf_config.get("vision_config", {}), VISION_NAMES)
    return fields | {"vision_config": vision, "text_config": text, "tie_word_embeddings": is_tied}


def renamed(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The fields, with the family's own names for their aliases."""
    return {names.get(key, key): value for key, value in fields.items()}


def usual_names(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The fields under the names that most Hugging Face configs use."""
    return {usual: fields[own] for usual, own in names.items()}


def pixel_limits(processor: dict[str, Any], usual: PixelLimits, name: str) -> PixelLimits:
    """The numbers of pixels to which a processor with these fields scales pictures; `usual` if it does not say.

    Raises:
        UserError: when the limits are not whole numbers in order.
    """
    size = processor.get("size") or {}
    limits = [
        processor.get(pixels) or size.get(edge) or size.get(pixels) or default
        for pixels, edge, default in (
            ("min_pixels", "shortest_edge", usual.least),
            ("max_pixels", "longest_edge", usual.most),
        )
    ]
    if not all(isinstance(limit, int) for limit in limits) or limits[0] > limits[1]:
        raise UserError(f"the processor of {name} scales to {limits[0]!r} to {limits[1]!r} pixels; mend `size` in it")
    return PixelLimits(*limits)
