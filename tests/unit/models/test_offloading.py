"""Layers whose saved tensors wait in host memory compute the same, and the device holds few layers' at a time."""

import gc

import pytest
import torch
from test_compilation import build, text_of

from dflop.costs.live_bytes import LiveBytes
from dflop.models import offloading
from dflop.models.compilation import replace_forwards
from dflop.models.offloading import offload_layers
from dflop.models.stages import LlmStage

LENGTHS = (300, 110)
NUM_LAYERS = 5


@pytest.fixture(autouse=True)
def _small_tensors_leave(monkeypatch):
    """The tiny model's tensors are smaller than those that are worth a copy."""
    monkeypatch.setattr(offloading, "LEAST_BYTES", 1 << 12)


def build_llm(**settings: int) -> LlmStage:
    return build("llm", NUM_LAYERS, **settings)


def loss_of(stage: LlmStage) -> torch.Tensor:
    text = text_of(LENGTHS)
    return stage(stage.embed(text, []), text)


def gradients_of(stage: LlmStage) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in stage.named_hf_parameters().items()}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("num_recomputed", [0, 2])
@pytest.mark.parametrize("num_offloaded", [1, 3, 5])
def test_gradients_are_those_of_kept_layers(num_offloaded, num_recomputed, is_compiled):
    num_offloaded = min(num_offloaded, NUM_LAYERS - num_recomputed)
    kept, offloaded = build_llm(), build_llm(num_recomputed=num_recomputed, num_offloaded=num_offloaded)
    if is_compiled:
        replace_forwards(offloaded, lambda forward: torch.compile(forward, dynamic=True, backend="aot_eager"))
    for stage in (kept, offloaded):
        # Two microbatches in flight, whose backwards come in the order of their forwards.
        losses = [loss_of(stage), loss_of(stage)]
        for loss in losses:
            loss.backward()
    expected = gradients_of(kept)
    for name, gradient in gradients_of(offloaded).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12, msg=name)


def test_a_layer_that_only_passes_gradients_on_is_offloaded_alike():
    """It keeps less than a trained one, as no gradient of a weight needs its inputs."""
    kept_bytes, gradients = [], []
    for num_offloaded in (0, 3):
        stage = build_llm(num_offloaded=num_offloaded)
        for name in stage.layer_names[:2]:
            stage.hf.get_submodule(name).requires_grad_(False)
        with LiveBytes() as live:
            loss = loss_of(stage)
            kept_bytes.append(live.now)
            loss.backward()
        gradients.append(gradients_of(stage))
    assert kept_bytes[1] < 0.6 * kept_bytes[0]
    without, offloaded = ({name for name, own in of.items() if own is None} for of in gradients)
    assert without == offloaded != set()
    for name in gradients[0].keys() - without:
        torch.testing.assert_close(gradients[1][name], gradients[0][name], rtol=1e-10, atol=1e-12, msg=name)


def test_the_device_keeps_none_of_an_offloaded_layer():
    kept, peaks = [], []
    gc.collect()
    gc.disable()  # what only the collector of cycles would free is kept for too long
    try:
        for num_offloaded in range(NUM_LAYERS):
            stage = build_llm(num_offloaded=num_offloaded)
            with LiveBytes() as live:
                loss = loss_of(stage)
                kept.append(live.now)
                loss.backward()
                peaks.append(live.peak)
                del loss
                stage.zero_grad()
                assert live.now == 0
    finally:
        gc.enable()
    a_layer = kept[0] - kept[1]
    assert a_layer > 0
    for num_offloaded in range(2, NUM_LAYERS):
        assert kept[0] - kept[num_offloaded] == pytest.approx(num_offloaded * a_layer, rel=0.01)
    assert kept[-1] < kept[0] - 3.9 * a_layer
    assert peaks[3] < peaks[0] - 0.9 * a_layer


def test_without_its_hooks_a_layer_keeps_what_it_saves():
    def kept_by(num_offloaded: int) -> int:
        stage.set_offloaded(num_offloaded)
        with LiveBytes() as live:
            loss = loss_of(stage)
            now = live.now
        del loss
        return now

    stage = build_llm()
    before = kept_by(0)
    assert kept_by(3) < before
    assert kept_by(0) == before


def test_tensors_leave_over_the_whole_forward_and_come_back_the_same_way(monkeypatch):
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)))
    seen, leave, bring = [], offloading._Pass.leave, offloading._Pass.bring
    monkeypatch.setattr(offloading._Pass, "leave", lambda own: (seen.append("leave"), leave(own)))
    monkeypatch.setattr(offloading._Pass, "bring", lambda own: (seen.append("bring"), bring(own)))
    handles = offload_layers(layers, 2)
    for place, layer in enumerate(layers):
        handles.append(layer.register_forward_hook(lambda *_, place=place: seen.append(place)))
        handles.append(layer.register_full_backward_pre_hook(lambda *_, place=place: seen.append(-place)))
    layers(torch.randn(256, 64, requires_grad=True)).sum().backward()
    assert seen == [0, 1, 2, "leave", 3, 4, 5, "leave", 6, 7, -7, -6, "bring", -5, -4, -3, "bring", -2, -1, 0]
    for handle in handles:
        handle.remove()


def test_a_graph_that_is_kept_can_go_backward_twice():
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).double()
    given = torch.randn(256, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = layers(given).tanh().sum()
    plain.backward()
    expected = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    handles = offload_layers(layers, 2)
    loss = layers(given).tanh().sum()
    loss.backward(retain_graph=True)
    layers(given)
    loss.backward()
    for parameter, gradient in zip(layers.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=1e-12, atol=1e-12)
    for handle in handles:
        handle.remove()
