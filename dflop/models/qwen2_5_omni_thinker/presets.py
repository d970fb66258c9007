"""Presets: named Hugging Face config fields, and the spec that follows from such fields.

`tiny` has few small layers and large patches. The others have the sizes of the thinkers of `Qwen2.5-Omni-{3B,7B}`.
"""

from typing import Any

from dflop.base import UserError
from dflop.models.checkpoint import check_output_width, check_processor
from dflop.models.presets import LLMS, TINY_LLM
from dflop.models.qwen2_5_omni_thinker.shapes import SAMPLES_A_FRAME, Qwen25OmniShapes
from dflop.models.qwen2_5_vl.presets import (
    FRAME,
    PICTURE,
    QWEN_3B,
    TINY_VISION,
    VISION_DEFAULTS,
    VISION_NAMES,
    pixel_limits,
    renamed,
    usual_names,
    with_axes,
)
from dflop.models.spec import SOUND_RATE_HZ, ModelSpec, encoder_of, vision_and_llm

__all__ = ["PRESETS", "make_spec"]

# What a config.json of the family may leave out, and the values that transformers then takes.
_VISION_DEFAULTS = {key: value for key, value in VISION_DEFAULTS.items() if key != "tokens_per_second"}
_AUDIO_DEFAULTS = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
    "n_window": 100,
    "output_dim": 3584,
}
_POSITIONS_A_SECOND = 25
# The limit of the released processors: longer sounds are cut off.
_MOST_SECONDS = 300
# Aliases that transformers accepts for fields.
_AUDIO_NAMES = {
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "intermediate_size": "encoder_ffn_dim",
}


def _thinker(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_omni_thinker",
        "vision_config": _VISION_DEFAULTS | {"hidden_size": 1280, "out_hidden_size": text["hidden_size"]},
        "audio_config": _AUDIO_DEFAULTS | {"output_dim": text["hidden_size"]},
        "text_config": _of_text(text, [16, 24, 24]) | {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6},
        "position_id_per_seconds": _POSITIONS_A_SECOND,
        "tie_word_embeddings": False,
    }


def _of_text(text: dict[str, Any], sections: list[int]) -> dict[str, Any]:
    return with_axes(text, sections) | {"model_type": "qwen2_5_omni_text"}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen2_5_omni_thinker",
        "vision_config": _VISION_DEFAULTS | TINY_VISION,
        "audio_config": _AUDIO_DEFAULTS
        | {
            "num_mel_bins": 80,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "d_model": 64,
            "output_dim": TINY_LLM["hidden_size"],
        },
        "text_config": _of_text(TINY_LLM, [4, 6, 6]) | {"bos_token_id": None, "eos_token_id": None},
        "position_id_per_seconds": _POSITIONS_A_SECOND,
        "tie_word_embeddings": False,
    },
    "qwen2_5_omni_3b": _thinker(QWEN_3B),
    "qwen2_5_omni_7b": _thinker(LLMS["qwen2.5_7b"]),
}


def make_spec(name: str, hf_config: dict[str, Any], processor: dict[str, Any] | None = None) -> ModelSpec:
    """The spec of a model of this family from the fields of its Hugging Face config and processor.

    Raises:
        UserError: naming the field that is missing, that the family's rules cannot use, or that contradicts another.
    """
    processor = processor or {}
    own_vision = renamed(hf_config.get("vision_config", {}), VISION_NAMES)
    own_audio = renamed(hf_config.get("audio_config", {}), _AUDIO_NAMES)
    text = {"model_type": "qwen2_5_omni_text"} | hf_config.get("text_config", {})
    vision, audio = _VISION_DEFAULTS | own_vision, _AUDIO_DEFAULTS | own_audio
    if text.get("use_sliding_window"):
        raise UserError(f"the config of {name} has `use_sliding_window`: true; only attention to all tokens is known")
    check_output_width(name, "vision_config.out_hidden_size", vision["out_hidden_size"], text)
    check_output_width(name, "audio_config.output_dim", audio["output_dim"], text)
    sounds = processor.get("feature_extractor", processor)
    rules = Qwen25OmniShapes(
        patch_size=vision["patch_size"],
        merge_size=vision["spatial_merge_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        window_size=vision["window_size"],
        tokens_per_second=hf_config.get("position_id_per_seconds", _POSITIONS_A_SECOND),
        num_layers=vision["depth"],
        num_full_layers=len(set(vision["fullatt_block_indexes"]) & set(range(vision["depth"]))),
        picture=pixel_limits(processor, PICTURE, name),
        frame=pixel_limits(processor.get("video_processor", {}), FRAME, name),
        chunk_frames=2 * audio["n_window"],
        most_frames=sounds.get("chunk_length", _MOST_SECONDS) * SOUND_RATE_HZ // SAMPLES_A_FRAME,
    )
    sizes = {"patch_size": rules.patch_size, "temporal_patch_size": rules.temporal_patch_size}
    check_processor(name, processor, sizes | {"merge_size": rules.merge_size})
    heard = {"feature_size": audio["num_mel_bins"], "sampling_rate": SOUND_RATE_HZ, "hop_length": SAMPLES_A_FRAME}
    check_processor(name, sounds, heard)
    seen, llm = vision_and_llm(name, vision | usual_names(vision, VISION_NAMES), text)
    return ModelSpec(
        family="qwen2_5_omni_thinker",
        name=name,
        hf_config=hf_config | {"vision_config": own_vision, "audio_config": own_audio, "text_config": text},
        modules=(seen, encoder_of("audio", usual_names(audio, _AUDIO_NAMES), ("audio",)), llm),
        rules=rules,
    )
