"""Layers that are recomputed but for attention keep its results, and compute the rest again."""

import gc

import pytest
import torch
from test_compilation import build, text_of
from torch.utils._python_dispatch import TorchDispatchMode

from dflop.costs.live_bytes import LiveBytes
from dflop.models.stages import LlmStage

LENGTHS = (300, 110)


class Kernels(TorchDispatchMode):
    """Counts attention's forward kernels."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.count += "attention" in name and "backward" not in name
        return function(*args, **(kwargs or {}))


def loss_of(stage: LlmStage) -> torch.Tensor:
    text = text_of(LENGTHS)
    return stage(stage.embed(text, []), text)


@pytest.mark.parametrize("num_attention_kept", [0, 1, 2])
def test_attention_of_these_layers_runs_once(num_attention_kept):
    stage = build("llm", num_recomputed=2, num_attention_kept=num_attention_kept)
    with Kernels() as kernels:
        loss = loss_of(stage)
        in_forward = kernels.count
        loss.backward()
    again = kernels.count - in_forward
    assert in_forward == len(stage.layer_names) * len(LENGTHS)
    assert again == in_forward * (2 - num_attention_kept) // 2


def test_each_layer_keeps_its_attention_from_forward_to_backward_and_nothing_longer():
    kept = []
    gc.collect()
    gc.disable()  # what only the collector of cycles would free is kept for too long
    try:
        for num_attention_kept in (0, 1, 2):
            stage = build("llm", num_recomputed=2, num_attention_kept=num_attention_kept)
            with LiveBytes() as live:
                loss = loss_of(stage)
                kept.append(live.now)
                loss.backward()
                del loss
                stage.zero_grad()
                assert live.now == 0
    finally:
        gc.enable()
    config = stage.hf.config.get_text_config()
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_bytes = 8 * (config.hidden_size // num_heads)
    # Queries, keys, values and the result, which is copied into one row, and for each head a sum.
    a_token = (3 * num_heads + 2 * num_kv_heads) * head_bytes + 8 * num_heads
    assert kept[1] - kept[0] == kept[2] - kept[1] == pytest.approx(sum(LENGTHS) * a_token, rel=0.01)
