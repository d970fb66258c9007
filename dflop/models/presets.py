"""The sizes of released LLMs, and of a tiny one, as fields of a Hugging Face `text_config`; the families' presets pair
them with encoders.

Fields that do not concern sizes are left to transformers' defaults. Vocabularies are those of the LLMs themselves;
multimodal models that add tokens set their own.
"""

from typing import Any

__all__ = ["LLMS", "TINY_LLM"]


def _qwen2(tied: bool = False, **sizes: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        **sizes,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": tied,
    }


def _llama3(**sizes: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        **sizes,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": False,
    }


_QWEN_7B = _qwen2(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152_064,
)
_QWEN_72B = _qwen2(
    hidden_size=8192,
    intermediate_size=29568,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=152_064,
)

# Qwen2.5 kept the sizes of Qwen2 at 7B and 72B, and added 32B between them.
LLMS: dict[str, dict[str, Any]] = {
    "qwen2_0.5b": _qwen2(
        tied=True,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
    ),
    "qwen2.5_1.5b": _qwen2(
        tied=True,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151_936,
    ),
    "qwen2_7b": _QWEN_7B,
    "qwen2.5_7b": _QWEN_7B,
    "qwen2.5_32b": _qwen2(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152_064,
    ),
    "qwen2_72b": _QWEN_72B,
    "qwen2.5_72b": _QWEN_72B,
    "llama3_8b": _llama3(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "llama3_70b": _llama3(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
}

# The LLM of the families' `tiny` presets. Query heads share key-value heads, as in the released LLMs.
TINY_LLM: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
