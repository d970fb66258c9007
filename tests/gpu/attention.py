"""Packed attention alone: right for every head size and number of segments, and as fast as on one long segment."""

import itertools
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dflop.models.attention import packed_attention
from dflop.models.microbatch import Exchange, SegmentEnds, SharedKeys
from tests.gpu.check import Figures, Setting
from tests.gpu.clock import seconds_of
from tests.gpu.gradients import attention_kernels
from tests.gpu.world import alone_in_world

__all__ = ["alone"]

# Query heads, key-value heads, head size, and whether it is causal: Qwen2-7B, SigLIP, InternViT-300M, Qwen2.5-VL's
# vision, InternViT-6B.
_HEADS = ((28, 4, 128, True), (16, 16, 72, False), (16, 16, 64, False), (16, 16, 80, False), (25, 25, 128, False))
_NUM_SEGMENTS = (1, 8, 64, 512, 4000)
# The sample whose shares are timed is so many times as long as the one on which attention is right.
_TIMES_LONGER = 8


def alone(setting: Setting) -> Figures:
    """Differences from exact attention in fp32, segment by segment; seconds beside those on one segment.

    The exact one is `packed_attention` in fp32, which tests hold against a textbook's formula.
    """
    with alone_in_world(setting) as device:  # a sample in runs takes part in an exchange
        return _alone(setting, device)


def _alone(setting: Setting, device: torch.device) -> Figures:
    figures: Figures = {}
    num_tokens = 64 if setting.is_tiny else 8192
    repeats = 1 if setting.is_tiny else 10
    counts = [count for count in _NUM_SEGMENTS if count <= num_tokens // 2]
    for kernel in attention_kernels(setting.device):
        for num_heads, num_kv_heads, head_size, is_causal in _HEADS[:1] if setting.is_fast else _HEADS:
            drawn = _draw(num_heads, num_kv_heads, head_size, num_tokens, device)
            worst = [0.0, 0.0]
            for count in counts:
                ends = SegmentEnds(_ends(num_tokens, count))
                ours = _passes([own.requires_grad_() for own in drawn], ends, is_causal)
                exact = _passes([own.detach().float().requires_grad_() for own in drawn], ends, is_causal)
                worst = [max(worst[0], _apart(ours[:1], exact[:1])), max(worst[1], _apart(ours[1:], exact[1:]))]
            name = f"{num_heads}:{num_kv_heads} heads of {head_size}, {kernel}"
            figures |= {f"output of {name}": worst[0], f"gradients of {name}": worst[1]}
            if is_causal:
                ours = _passes([own.requires_grad_() for own in drawn], _as_two_runs(num_tokens, device), is_causal)
                exact = _passes(
                    [own.detach().float().requires_grad_() for own in drawn], SegmentEnds([num_tokens]), is_causal
                )
                figures[f"output of a sample in two runs, {name}"] = _apart(ours[:1], exact[:1])
                figures[f"gradients of a sample in two runs, {name}"] = _apart(ours[1:], exact[1:])
                for degree in (2, 8):
                    over = _share_over_part(drawn, degree, repeats)
                    figures[f"seconds of a share over its part of the sample, one of {degree}, {name}"] = over
            ratio = _seconds_beside(drawn, is_causal, device, repeats)
            figures[f"seconds beside SDPA's on one segment, {name}"] = ratio
    return figures


def _draw(num_heads: int, num_kv_heads: int, head_size: int, num_tokens: int, device: torch.device):
    """Query, key and value in bf16, [1, num_heads, num_tokens, head_size]."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, heads, num_tokens, head_size) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes]


def _ends(num_tokens: int, count: int) -> list[int]:
    """The ends of segments of unequal lengths; where there are several, the first has one token."""
    weights = torch.linspace(1, 3, count, dtype=torch.float64).cumsum(0)
    ends = (weights / weights[-1] * num_tokens).round().long().clamp(min=1)
    ends[0] = num_tokens if count == 1 else 1
    return sorted(set(ends.tolist()))


def _as_two_runs(num_tokens: int, device: torch.device) -> SegmentEnds:
    """One sample as two runs of queries, as shares have them: the second attends to more keys than it has queries."""
    first = num_tokens // 4
    return _runs([first, num_tokens - first], [first, num_tokens], device)


def _runs(lengths: list[int], ends: list[int], device: torch.device) -> SegmentEnds:
    """Runs of queries of these lengths, of one sample; each attends to all keys up to its end, which are all here."""
    keys = SharedKeys(
        queries=SegmentEnds(list(itertools.accumulate(lengths))),
        keys=SegmentEnds(list(itertools.accumulate(ends))),
        rows=torch.cat([torch.arange(end) for end in ends]),
        exchange=Exchange(rows=torch.arange(0), num_sent=(0,), num_received=(0,)),
    )
    return SegmentEnds([sum(lengths)], keys=keys).to(device)


def _share_over_part(drawn: list[torch.Tensor], degree: int, repeats: int) -> float:
    """Seconds of one of `degree` shares of a sample, forward and backward, over as large a part of the whole sample's.
    The sample is `drawn`, `_TIMES_LONGER` over; the share has its first run and its last."""
    whole = [own.detach().repeat(1, 1, _TIMES_LONGER, 1).requires_grad_() for own in drawn]
    num_tokens, device = whole[0].shape[2], whole[0].device
    run = num_tokens // (2 * degree)
    share = [whole[0][:, :, : 2 * run].detach().clone().requires_grad_(), *whole[1:]]
    pairs = (share, _runs([run, run], [run, num_tokens], device)), (whole, SegmentEnds([num_tokens]).to(device))
    share_s, whole_s = (seconds_of(partial(_passes, *pair, is_causal=True), device, repeats) for pair in pairs)
    return share_s * degree / whole_s


def _passes(tensors: list[torch.Tensor], ends: SegmentEnds, is_causal: bool) -> list[torch.Tensor]:
    """The output and the gradients of the tensors, for an output gradient of the output's own values."""
    at = ends.to(tensors[0].device)
    made, _ = packed_attention(None, *tensors, None, segment_ends=at, is_causal=is_causal)
    return [made.detach(), *torch.autograd.grad(made, tensors, made.detach())]


def _apart(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(float((own.float() - theirs).norm() / theirs.norm()) for own, theirs in zip(ours, exact, strict=True))


def _seconds_beside(drawn: list[torch.Tensor], is_causal: bool, device: torch.device, repeats: int) -> float:
    """Forward and backward on one segment, beside torch's flash kernel on the same."""
    tensors = [own.detach().requires_grad_() for own in drawn]
    num_tokens = tensors[0].shape[2]
    num_sharing = tensors[0].shape[1] // tensors[1].shape[1]

    ends = SegmentEnds([num_tokens]).to(device)

    def packed() -> None:
        made, _ = packed_attention(None, *tensors, None, segment_ends=ends, is_causal=is_causal)
        torch.autograd.grad(made, tensors, made.detach())

    query, *others = tensors
    whole = [query, *(own.detach().repeat_interleave(num_sharing, dim=1).requires_grad_() for own in others)]

    def plain() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            made = scaled_dot_product_attention(*whole, is_causal=is_causal)
        torch.autograd.grad(made, whole, made.detach())

    return seconds_of(packed, device, repeats) / seconds_of(plain, device, repeats)
