"""Attention over packed sequences: several samples in one row, none of which sees another.

It is registered with transformers as `PACKED`, so that unmodified Hugging Face layers use it. The caller passes
`segment_ends` (`microbatch.SegmentEnds`) through the layers' keyword arguments. In bf16 and fp16 on GPUs a
variable-length kernel runs: that of flash-attn 3 on Hopper if it is installed, else flash-attn 2's, else torch's.
Otherwise exact scaled-dot-product attention runs on each segment, or on several adjacent ones of the same length.
`kernel_name` says which of them runs.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from dflop.base.torch_versions import grouped_queries
from dflop.models.kept_attention import made_once
from dflop.models.microbatch import SegmentEnds
from dflop.models.share_attention import behind_others
from dflop.models.shared_samples import keys_and_values

__all__ = ["PACKED", "OneSegment", "clocked_attention", "is_hopper", "kernel_name", "packed_attention"]

PACKED = "dflop_packed"
# The packages whose `flash_attn_varlen_func` is used, the fastest first. The first one runs on Hopper only.
_FLASH = {"flash-attn 3": "flash_attn_interface", "flash-attn 2": "flash_attn"}

# Where torch's kernel for fp32 that keeps no matrix of a segment's squared length needs as many key-value heads as
# queries. CPUs have one that does not.
_REPEATS_HEADS_ON = {"cuda"}
_CLOCK: ContextVar[Callable[[], None] | None] = ContextVar("clock", default=None)


class OneSegment:
    """One segment that covers all positions of `hidden`, in place of the `cu_seqlens` of Hugging Face's encoder layers.

    With the true bounds, these layers would loop over segments and launch kernels for each; `packed_attention` gets the
    true ones from `segment_ends`. Layers take differences of the bounds and ask for them as a list. A tensor's values
    could be read neither by torch.compile nor of fake tensors; a shape can.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        self._positions = hidden.new_empty(len(hidden), 0)

    def __getitem__(self, _: slice) -> "OneSegment":
        return self

    def __sub__(self, _: "OneSegment") -> "OneSegment":
        return self

    def tolist(self) -> list[int]:
        """The lengths of all segments."""
        return [len(self._positions)]


def kernel_name(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel of packed attention: `flash-attn 3`, `flash-attn 2`, `torch varlen`, or `sdpa`, which is torch's
    scaled-dot-product attention segment by segment."""
    return _flash_attention(is_hopper(device))[0] if _has_varlen(device, dtype) else "sdpa"


@contextmanager
def clocked_attention(mark: Callable[[], Any]) -> Iterator[list[Any]]:
    """What `mark` returns when attention of a layer begins and when it ends, in turn."""
    marks: list[Any] = []
    before = _CLOCK.set(lambda: marks.append(mark()))
    try:
        yield marks
    finally:
        _CLOCK.reset(before)


def _clocked(attention: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attention)
    def clocked(*args: Any, **kwargs: Any) -> Any:
        note = _CLOCK.get()
        if note is None:
            return attention(*args, **kwargs)
        note()
        made = attention(*args, **kwargs)
        note()
        return made

    return clocked


@made_once
@_clocked
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segment_ends: SegmentEnds,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = True,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention inside each segment, causal or full. Where samples are shared with other replicas (`SharedKeys`), each
    segment of queries attends to one of keys, with the last query at the last key.

    `query` is [1, num_heads, num_tokens, head_dim], `key` and `value` [1, num_kv_heads, num_tokens, head_dim]. Returns
    [1, num_tokens, num_heads, head_dim], and None for the attention weights.
    """
    assert attention_mask is None, "packed sequences carry no mask: the segments are the mask"
    key_ends = queries = segment_ends
    if segment_ends.keys is not None:
        queries, key_ends = segment_ends.keys.queries, segment_ends.keys.keys
        key, value = keys_and_values(key, value, segment_ends.keys)
    # Fake tensors have no values: only what the kernel for all segments computes and keeps matters.
    is_fake = isinstance(query, (FakeTensor, FunctionalTensor))
    if is_fake or _has_varlen(query.device, value.dtype):
        assert not dropout, "the variable-length kernels have no dropout"
        return _varlen(query, key, value, queries, key_ends, scaling, is_causal), None
    attended, end, key_end = [], 0, 0
    # Adjacent segments of the same length, such as windows, are computed as a batch.
    for (length, key_length), group in itertools.groupby(zip(_lengths(queries), _lengths(key_ends), strict=True)):
        start, key_start, count = end, key_end, len(list(group))
        end, key_end = start + count * length, key_start + count * key_length
        batch = [query[0, :, start:end].unflatten(1, (count, length)).transpose(0, 1)]
        batch += [
            tensor[0, :, key_start:key_end].unflatten(1, (count, key_length)).transpose(0, 1) for tensor in (key, value)
        ]
        if query.device.type in _REPEATS_HEADS_ON:
            batch = [tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in batch]
        how = {"dropout_p": dropout, "scale": scaling, "enable_gqa": batch[0].shape[1] != batch[1].shape[1]}
        if length == key_length or not is_causal:
            made = scaled_dot_product_attention(*batch, is_causal=is_causal, **how)
        else:
            made = behind_others(*batch, how)
        attended.append(made.transpose(0, 1).flatten(1, 2))
    # `cat` copies even a single segment, so that the memory does not depend on how a microbatch is cut into segments.
    return torch.cat(attended, dim=1).transpose(0, 1).unsqueeze(0), None


def _lengths(ends: SegmentEnds) -> list[int]:
    return [end - start for start, end in itertools.pairwise([0, *ends.ends])]


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: SegmentEnds,
    keys: SegmentEnds,
    scaling: float | None,
    is_causal: bool,
) -> torch.Tensor:
    is_fake = isinstance(query, (FakeTensor, FunctionalTensor))
    bounds, longest = (queries.bounds, keys.bounds), (queries.longest, keys.longest)
    if isinstance(query, FunctionalTensor):
        bounds = (query.new_empty(0, dtype=torch.int32),) * 2  # a trace would hold the values
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    flash = None if is_fake else _flash_attention(is_hopper(query.device))[1]
    if flash is not None:
        attended = flash(*packed, *bounds, *longest, softmax_scale=scaling, causal=is_causal)
        if isinstance(attended, tuple):  # early versions of flash-attn 3 return log-sum-exps as well
            attended = attended[0]
    else:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0) if is_causal else (-1, -1)
        attended = varlen_attn(
            *packed,
            *bounds,
            *longest,
            scale=scaling,
            window_size=window,
            **grouped_queries(varlen_attn),
        )
    return attended.unsqueeze(0)


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def is_hopper(device: torch.device) -> bool:
    """Whether flash-attn 3 runs on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _flash_attention(is_hopper: bool) -> tuple[str, Callable[..., torch.Tensor] | None]:
    """The name of the variable-length kernel, and its function, None for torch's own."""
    for name, package in _FLASH.items():
        if name == "flash-attn 3" and not is_hopper:
            continue
        try:
            # flash-attn 4 installs a package of flash-attn 2's name without the function.
            return name, importlib.import_module(package).flash_attn_varlen_func
        except (ImportError, AttributeError):
            continue
    return "torch varlen", None


AttentionInterface.register(PACKED, packed_attention)
