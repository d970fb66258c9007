"""Packed attention equals the textbook formula on each segment by itself."""

import inspect
import itertools
import math
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.varlen
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from dflop.base.torch_versions import grouped_queries
from dflop.models import attention
from dflop.models.attention import PACKED, kernel_name, packed_attention
from dflop.models.microbatch import Exchange, SegmentEnds, SharedKeys
from dflop.models.share_attention import behind_others, masked
from dflop.shapes.shares import runs_of


def textbook_attention(query, key, value, scaling, is_causal=True):
    """softmax(QK'/sqrt(d) + causal mask) V of one segment, key and value heads repeated for grouped queries."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & is_causal
    return scores.masked_fill(future, -math.inf).softmax(-1) @ value


def draw(num_tokens, num_heads, num_kv_heads, head_dim, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, num_tokens, head_dim, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.one_of(st.just(4), st.integers(1, 9)), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    scaling=st.sampled_from([None, 0.3]),
    is_causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packed_segments_equal_separate_sequences_in_output_and_gradient(lengths, heads, scaling, is_causal, seed):
    packed = draw(sum(lengths), *heads, 8, seed)
    alone = [tensor.detach().clone().requires_grad_() for tensor in packed]
    ends = list(itertools.accumulate(lengths))

    how = {"scaling": scaling, "is_causal": is_causal}
    output, weights = packed_attention(None, *packed, None, segment_ends=SegmentEnds(ends), **how)
    parts = [
        textbook_attention(*(tensor[:, :, end - length : end] for tensor in alone), scaling or 8**-0.5, is_causal)
        for end, length in zip(ends, lengths, strict=True)
    ]
    expected = torch.cat(parts, dim=2).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)

    slope = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    output.backward(slope)
    expected.backward(slope)
    for mine, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.fixture
def group_of_one():
    """A process group in which a replica sends rows to itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize(("num_tokens", "degree"), [(64, 2), (37, 4), (16, 8)])
def test_shares_attend_as_the_whole_sample_does_in_output_and_gradient(group_of_one, num_tokens, degree, heads):
    """All shares and a whole sample in one microbatch. Keys of the share itself stand there, all others are sent."""
    shares = [runs_of(num_tokens, degree, share) for share in range(degree)]
    order = torch.tensor([token for runs in shares for run in runs for token in run])
    alone = 5
    packed_at = order.argsort()
    rows = []
    for runs in shares:
        own = torch.isin(torch.arange(num_tokens), torch.tensor([token for run in runs for token in run]))
        found = torch.where(own, packed_at, num_tokens + alone + packed_at)
        rows += [found[: run.stop] for run in runs]
    rows.append(num_tokens + torch.arange(alone))
    queries = [*(len(run) for runs in shares for run in runs), alone]
    keys = SharedKeys(
        queries=SegmentEnds(list(itertools.accumulate(queries))),
        keys=SegmentEnds(list(itertools.accumulate(map(len, rows)))),
        rows=torch.cat(rows),
        exchange=Exchange(
            rows=torch.arange(num_tokens), num_sent=(num_tokens,), num_received=(num_tokens,), group=group_of_one
        ),
    )
    whole = draw(num_tokens + alone, *heads, 8, seed=1)
    packed = [
        torch.cat([tensor[:, :, order], tensor[:, :, num_tokens:]], dim=2).detach().requires_grad_() for tensor in whole
    ]
    ends = SegmentEnds([num_tokens, num_tokens + alone], keys=keys)
    output, _ = packed_attention(None, *packed, None, segment_ends=ends, scaling=0.3)
    expected = torch.cat(
        [
            textbook_attention(*(own[:, :, part] for own in whole), 0.3)
            for part in (slice(num_tokens), slice(num_tokens, None))
        ],
        dim=2,
    ).transpose(1, 2)
    expected = torch.cat([expected[:, order], expected[:, num_tokens:]], dim=1)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)

    slope = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    output.backward(slope)
    expected.backward(slope)
    for ours, theirs in zip(packed, whole, strict=True):
        gradient = torch.cat([theirs.grad[:, :, order], theirs.grad[:, :, num_tokens:]], dim=2)
        torch.testing.assert_close(ours.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_two_calls_without_a_mask_give_what_masks_give_in_output_and_gradient(dtype, tolerance):
    query, key, value = (own.detach().to(dtype) for own in draw(700, 4, 2, 8, seed=3))
    ours = [own.clone().requires_grad_() for own in (query[:, :, 300:], key, value)]
    theirs = [own.detach().clone().requires_grad_() for own in ours]
    how = {"dropout_p": 0.0, "scale": 0.3, "enable_gqa": True}
    made, expected = behind_others(*ours, how), masked(*theirs, how)
    slope = torch.randn(made.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    made.backward(slope)
    expected.backward(slope)
    for one, other in zip([made, *(own.grad for own in ours)], [expected, *(own.grad for own in theirs)], strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_in_fp32_on_gpus_key_value_heads_are_repeated_which_the_kernel_without_a_quadratic_matrix_needs(monkeypatch):
    seen, plain = [], attention.scaled_dot_product_attention

    def kernel(query, key, value, *, enable_gqa, **how):
        assert not enable_gqa
        seen.append((query.shape[1], key.shape[1], value.shape[1]))
        return plain(query, key, value, **how)

    tensors, ends = draw(9, 6, 2, 8, seed=0), SegmentEnds([2, 4, 9])
    expected, _ = packed_attention(None, *tensors, None, segment_ends=ends)
    of_grouped = torch.autograd.grad(expected.sum(), tensors)
    on_cpus = {{"cuda": "cpu"}[device] for device in attention._REPEATS_HEADS_ON}
    monkeypatch.setattr(attention, "_REPEATS_HEADS_ON", on_cpus)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    output, _ = packed_attention(None, *tensors, None, segment_ends=ends)
    assert seen == [(6, 6, 6)] * 2
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(torch.autograd.grad(output.sum(), tensors), of_grouped, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_segment_sees_another():
    tensors = draw(7, 2, 2, 4, seed=0)
    before, _ = packed_attention(None, *tensors, None, segment_ends=SegmentEnds([3, 7]))
    with torch.no_grad():
        for tensor in tensors:
            tensor[:, :, 3:] += 1.0
    after, _ = packed_attention(None, *tensors, None, segment_ends=SegmentEnds([3, 7]))
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


def test_a_variable_length_kernel_gets_what_gives_the_same_and_the_bounds_that_came_with_the_microbatch(monkeypatch):
    """The kernel is flash-attn's by its signature, computed segment by segment."""
    seen = []

    def flash(query, key, value, bounds, key_bounds, longest, longest_key, *, softmax_scale, causal):
        assert causal
        assert bounds is key_bounds
        assert longest == longest_key == max(bounds.diff())
        seen.append(bounds)
        segments = [
            textbook_attention(*(part[start:end].transpose(0, 1)[None] for part in (query, key, value)), softmax_scale)
            for start, end in itertools.pairwise(bounds.tolist())
        ]
        return torch.cat(segments, dim=2)[0].transpose(0, 1)

    monkeypatch.setattr(attention, "_flash_attention", lambda is_hopper: ("flash-attn 2", flash))
    tensors, ends = draw(9, 4, 2, 8, seed=0), SegmentEnds([2, 3, 9])
    exact, _ = packed_attention(None, *tensors, None, segment_ends=ends, scaling=0.3)
    torch.testing.assert_close(attention._varlen(*tensors, ends, ends, 0.3, True), exact)
    assert seen == [ends.bounds]
    assert (ends.bounds.dtype, ends.bounds.tolist()) == (torch.int32, [0, 2, 3, 9])


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("installed", "capability", "dtype", "name"),
    [
        ({"flash_attn_interface", "flash_attn"}, HOPPER, torch.bfloat16, "flash-attn 3"),
        ({"flash_attn_interface", "flash_attn"}, AMPERE, torch.float16, "flash-attn 2"),
        ({"flash_attn_interface"}, AMPERE, torch.bfloat16, "torch varlen"),
        ({"flash_attn"}, HOPPER, torch.bfloat16, "flash-attn 2"),
        (set(), HOPPER, torch.bfloat16, "torch varlen"),
        ({"flash_attn_interface", "flash_attn"}, HOPPER, torch.float32, "sdpa"),
        ({"flash_attn_interface", "flash_attn"}, None, torch.bfloat16, "sdpa"),
    ],
)
def test_the_fastest_kernel_that_is_installed_and_runs_on_the_device_is_used_and_named(
    installed, capability, dtype, name, monkeypatch
):
    """flash-attn 4 has a package of flash-attn 2's name without the function."""
    for package in ("flash_attn_interface", "flash_attn"):
        module = types.ModuleType(package)
        if package in installed:
            module.flash_attn_varlen_func = lambda: None
        monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    attention._flash_attention.cache_clear()
    try:
        assert kernel_name(torch.device("cuda" if capability else "cpu"), dtype) == name
    finally:
        attention._flash_attention.cache_clear()


def kernel_of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """Segment by segment; it checks no numbers of heads, and its kernel repeats key-value heads by itself."""
    assert max_q == max_k == max(cu_seq_q.diff())
    segments = [
        textbook_attention(
            *(part[start:end].transpose(0, 1)[None] for part in (query, key, value)), scale, window_size == (-1, 0)
        )
        for start, end in itertools.pairwise(cu_seq_q.tolist())
    ]
    return torch.cat(segments, dim=2)[0].transpose(0, 1)


def kernel_of_torch_2_13(query, key, value, *bounds, enable_gqa=False, seqused_k=None, block_table=None, **how):
    """It refuses fewer key-value heads than queries, unless it is told to expect them."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return kernel_of_torch_2_11(query, key, value, *bounds, **how)


@pytest.mark.parametrize("kernel", [kernel_of_torch_2_11, kernel_of_torch_2_13])
def test_torchs_kernel_is_called_as_its_version_has_it(kernel, monkeypatch):
    monkeypatch.setattr(attention, "_flash_attention", lambda is_hopper: ("torch varlen", None))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    tensors, ends = draw(9, 4, 2, 8, seed=0), SegmentEnds([2, 3, 9])
    for is_causal in (True, False):
        exact, _ = packed_attention(None, *tensors, None, segment_ends=ends, scaling=0.3, is_causal=is_causal)
        torch.testing.assert_close(attention._varlen(*tensors, ends, ends, 0.3, is_causal), exact)


def test_the_installed_torchs_kernel_takes_what_it_is_passed():
    kernel = torch.nn.attention.varlen.varlen_attn
    told = {"scale": 0.3, "window_size": (-1, 0), **grouped_queries(kernel)}
    inspect.signature(kernel).bind(*range(7), **told)


def test_a_mask_beside_the_segments_is_refused():
    with pytest.raises(AssertionError, match="the segments are the mask"):
        packed_attention(None, *draw(4, 1, 1, 4, 0), torch.zeros(1, 1, 4, 4), segment_ends=SegmentEnds([4]))


def test_transformers_knows_it_by_its_name():
    assert AttentionInterface()[PACKED] is packed_attention
