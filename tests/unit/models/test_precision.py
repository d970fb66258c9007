"""Weights that are computed in bf16: what is added up beside them, and what stays as it is."""

import torch
from torch import nn

from dflop.models.precision import compute_in, held_in


def test_gradients_that_bf16_would_swallow_are_added_up():
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.grad = gradient = torch.full((1, 1), 256.0)
    compute_in(layer, torch.bfloat16)
    for _ in range(100):
        layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.grad is gradient
    assert gradient.item() == 356.0  # in bf16 the next number after 256 is 258


def test_buffers_keep_their_precision_and_frozen_weights_change_with_the_others():
    layer = nn.BatchNorm1d(3).requires_grad_(False)
    compute_in(layer, torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.running_mean.dtype == torch.float32


def test_what_is_wider_than_fp32_is_held_as_it_is():
    assert held_in(torch.bfloat16) == held_in(torch.float32) == torch.float32
    assert held_in(torch.float64) == torch.float64
