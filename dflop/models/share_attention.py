"""Attention of a share of a sample, where no variable-length kernel runs: causal, with more keys than queries.

The queries are the last ones of the keys' sequence. torch's kernels take that as a mask alone, which costs a CPU a
fifth of attention's time. So on CPUs two calls without a mask are made: to the keys before all queries, and causally to
the queries' own. Each is a softmax over its keys; the log-sum-exps join them. A part's backward is that of the kernel,
given the joined output and log-sum-exps.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["behind_others", "masked"]

# How many queries a mask is made for at a time.
_QUERIES_AT_ONCE = 256


def behind_others(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """Attention of queries [batch, num_heads, num_queries, head_dim] that stand behind other tokens, to keys and values
    [batch, num_kv_heads, num_keys, head_dim] with num_keys > num_queries. `how` are options of torch's function."""
    if query.device.type == "cpu" and not how["dropout_p"]:
        return _InTwoParts.apply(query, key, value, how["scale"])
    return masked(query, key, value, how)


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """The same by masks, each of some queries, on any device."""
    before, made = key.shape[-2] - query.shape[-2], []
    for start in range(0, query.shape[-2], _QUERIES_AT_ONCE):
        own = query[..., start : start + _QUERIES_AT_ONCE, :]
        num_keys = before + start + own.shape[-2]
        mask = torch.ones(own.shape[-2], num_keys, dtype=torch.bool, device=query.device).tril(before + start)
        made.append(
            scaled_dot_product_attention(own, key[..., :num_keys, :], value[..., :num_keys, :], attn_mask=mask, **how)
        )
    return torch.cat(made, dim=-2)


class _InTwoParts(torch.autograd.Function):
    """Full attention to the keys before the queries, and causal attention to the queries' own."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        keys, values = _parts(query, key), _parts(query, value)
        before, before_sums = attend(query, keys[0], values[0], scale=scale)
        own, own_sums = attend(query, keys[1], values[1], is_causal=True, scale=scale)
        sums = torch.logaddexp(before_sums, own_sums)
        output = before * (before_sums - sums).exp().unsqueeze(-1) + own * (own_sums - sums).exp().unsqueeze(-1)
        output = output.to(query.dtype)  # sums of halves are in fp32
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        keys, values = _parts(query, key), _parts(query, value)
        joined = (output, sums, 0.0)
        before = attend_backward(gradient, query, keys[0], values[0], *joined, False, scale=ctx.scale)
        own = attend_backward(gradient, query, keys[1], values[1], *joined, True, scale=ctx.scale)
        of_key, of_value = (torch.cat(parts, dim=-2) for parts in zip(before[1:], own[1:], strict=True))
        return before[0] + own[0], of_key, of_value, None


def _parts(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys, or values, of the tokens before the queries, and of the queries' own tokens."""
    before = keys.shape[-2] - query.shape[-2]
    return keys[..., :before, :], keys[..., before:, :]
