"""Samples that several replicas of the LLM compute together (context parallelism), each a share of their tokens.

A token attends to all before it, also to those of other shares. So in each layer the replicas exchange keys and values,
each sending its tokens' to all others of the sample. With grouped queries these are a small part of a token's values:
for eight ranks of a model with 28 heads and 4 key-value heads as many bytes as exchanging heads (Ulysses) would take,
for fewer ranks less, and any number of heads can be divided. Llama 3 (2024, section 3.3.2) gathers keys and values for
the same reason.

All replicas of a group take part in each exchange, also those without a share. One exchange serves samples over two,
four and eight ranks.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dflop.models.microbatch import Exchange, SegmentEnds, SharedFeatures, SharedKeys, TextBatch

__all__ = ["exchanged", "joined_to", "keys_and_values", "place_features"]


def joined_to(batch: TextBatch, group: dist.ProcessGroup | None) -> TextBatch:
    """The batch with the process group of the replicas that it is shared with, if it is."""
    keys, features = batch.segment_ends.keys, batch.shared_features
    if keys is None:
        return batch
    assert group is not None, "a plan without `cp` shares no sample"
    ends = SegmentEnds(
        batch.segment_ends.ends, batch.segment_ends.bounds, replace(keys, exchange=replace(keys.exchange, group=group))
    )
    if features is not None:
        features = replace(features, exchange=replace(features.exchange, group=group))
    return replace(batch, segment_ends=ends, shared_features=features)


def exchanged(values: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """What other replicas send of their `values` [num_rows, width]: [num_received, width], by sender."""
    return _Exchanged.apply(values, exchange)


def keys_and_values(key: torch.Tensor, value: torch.Tensor, keys: SharedKeys) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values that a microbatch's tokens attend to, [1, num_kv_heads, num_keys, head_dim], from those of
    its own tokens [1, num_kv_heads, num_tokens, head_dim]."""
    num_heads, num_tokens, head_dim = key.shape[1:]
    own = torch.stack([key[0], value[0]]).permute(2, 0, 1, 3).reshape(num_tokens, -1)
    attended = torch.cat([own, exchanged(own, keys.exchange)]).index_select(0, keys.rows)
    key, value = attended.view(-1, 2, num_heads, head_dim).permute(1, 2, 0, 3)
    return key.unsqueeze(0), value.unsqueeze(0)


def place_features(hidden: torch.Tensor, features: list[torch.Tensor], shared: SharedFeatures) -> torch.Tensor:
    """Put features [num_features, width] into their places in `hidden` [num_tokens, width]: those that came to this
    replica, or through it to another that has their tokens."""
    own = torch.cat(features)
    values = torch.cat([own, exchanged(own, shared.exchange)]).index_select(0, shared.rows)
    return hidden.index_copy(0, shared.positions, values.to(hidden.dtype))


class _Exchanged(torch.autograd.Function):
    """Rows sent and received; gradients of received rows are sent back, and added to those of the rows sent."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.num_rows = exchange, len(values)
        received = values.new_empty(sum(exchange.num_received), values.shape[1])
        sent = values.index_select(0, exchange.rows)
        dist.all_to_all_single(received, sent, exchange.num_received, exchange.num_sent, group=exchange.group)
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange = ctx.exchange
        returned = gradient.new_empty(len(exchange.rows), gradient.shape[1])
        dist.all_to_all_single(
            returned, gradient.contiguous(), exchange.num_sent, exchange.num_received, group=exchange.group
        )
        summed = gradient.new_zeros(ctx.num_rows, gradient.shape[1])
        return summed.index_add_(0, exchange.rows, returned), None
