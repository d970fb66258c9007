"""Weights' gradients that are put off: the same as at once, whatever the precision, and nothing is kept behind."""

import pytest
import torch
from torch import nn

from dflop.models.deferral import Deferral
from dflop.models.precision import compute_in, held_in


def make_layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False)).to(dtype)


def gradients_of(layers: nn.Module) -> list[torch.Tensor]:
    return [own.grad.clone() for own in layers.parameters()]


def backward(layers: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Gradients are added to `.grad`; returns that of the inputs."""
    leaf = inputs.clone().requires_grad_()
    layers(leaf).square().sum().backward()
    return leaf.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_gradients_that_are_put_off_are_those_of_a_plain_backward(dtype, tolerance):
    plain, split = make_layers(held_in(dtype)), make_layers(held_in(dtype))
    deferral = Deferral(split)
    batches = torch.randn(3, 2, 4, 5, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for layers in (plain, split):
        for own in layers.parameters():
            own.grad = torch.zeros_like(own)
        compute_in(layers, dtype)
    put_off = []
    for batch in batches:
        expected = backward(plain, batch)
        with deferral.collecting() as pending:
            torch.testing.assert_close(backward(split, batch), expected, rtol=tolerance, atol=tolerance)
        put_off.append(pending)
    linear = split[0].weight
    assert not linear.grad.any()  # nothing of it yet, although the norm behind it has its own
    assert split[1].weight.grad.any()
    for pending in put_off:
        deferral.compute(pending)
        assert not pending
    for ours, theirs in zip(gradients_of(split), gradients_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_each_parameter_is_told_of_when_the_last_of_its_gradients_is_added():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, dtype=torch.float64)
    layers, told = nn.Sequential(layer, nn.Tanh(), layer), []
    deferral = Deferral(layers)
    plain = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh()))
    plain[0].load_state_dict(layer.state_dict())
    inputs = torch.randn(3, 4, dtype=torch.float64)
    for own in (*layer.parameters(), *plain.parameters()):
        own.grad = torch.zeros_like(own)
    backward(nn.Sequential(plain[0], plain[1], plain[0]), inputs)
    with deferral.collecting() as pending:
        backward(layers, inputs)
    deferral.compute(pending, lambda own: told.append((own, own.grad.clone())))
    assert [own for own, _ in told] == [layer.weight, layer.bias]
    for (_, gradient), expected in zip(told, gradients_of(plain), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_outside_of_a_split_backward_gradients_come_at_once():
    plain, split = make_layers(torch.float64), make_layers(torch.float64)
    Deferral(split)
    inputs = torch.randn(4, 5, dtype=torch.float64)
    for layers in (plain, split):
        backward(layers, inputs)
    for ours, theirs in zip(gradients_of(split), gradients_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_frozen_layer_passes_its_gradient_on_and_puts_nothing_off():
    layers = make_layers(torch.float64)
    layers.requires_grad_(False)
    deferral = Deferral(layers)
    with deferral.collecting() as pending:
        assert backward(layers, torch.randn(4, 5, dtype=torch.float64)).any()
    assert not pending
