"""Attention over packed sequences: several samples in one row, none of which sees another.

Registered with transformers under `PACKED`, so that unmodified Hugging Face layers use it. The caller
passes `segment_ends` (a list of end positions) through the layers' keyword arguments. On GPUs a
variable-length kernel runs, flash-attn's if it is installed, else torch's; elsewhere one exact
scaled-dot-product attention a segment.
"""

import functools
import itertools
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

__all__ = ["PACKED", "packed_causal_attention"]

PACKED = "dflop_packed"


def packed_causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segment_ends: list[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each segment.

    `query` is [1, num_heads, num_tokens, head_dim], `key` and `value` [1, num_kv_heads, …]; returns
    [1, num_tokens, num_heads, head_dim].
    """
    assert attention_mask is None, "packed sequences carry no mask: the segments are the mask"
    # Rotary positions come in fp32, which promotes queries and keys; the values keep the compute dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.is_cuda and value.dtype in (torch.bfloat16, torch.float16):
        assert not dropout, "the variable-length kernels have no dropout"
        return _varlen(query, key, value, segment_ends, scaling), None
    starts = [0, *segment_ends[:-1]]
    attended = [
        scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
        for start, end in zip(starts, segment_ends, strict=True)
    ]
    return torch.cat(attended, dim=2).transpose(1, 2), None


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment_ends: list[int], scaling: float | None
) -> torch.Tensor:
    bounds = _bounds(tuple(segment_ends), query.device)
    longest = max(end - start for start, end in itertools.pairwise([0, *segment_ends]))
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    flash = _flash_attention()
    if flash is not None:
        attended = flash(*packed, bounds, bounds, longest, longest, softmax_scale=scaling, causal=True)
    else:
        from torch.nn.attention.varlen import varlen_attn

        attended = varlen_attn(
            *packed, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True
        )
    return attended.unsqueeze(0)


@functools.lru_cache(maxsize=256)
def _bounds(segment_ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Where segments begin and end, [num_segments + 1], int32.

    Kept for a microbatch's other layers and its backward: each copy from the host waits for the device.
    """
    return torch.tensor([0, *segment_ends], dtype=torch.int32, device=device)


@functools.cache
def _flash_attention() -> Callable[..., torch.Tensor] | None:
    """flash-attn's variable-length kernel where the package is installed (the `gpu` extra)."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


AttentionInterface.register(PACKED, packed_causal_attention)
