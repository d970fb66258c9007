"""Adapters: which linear layers get them, how they begin, and which patterns are refused."""

import pytest
import torch

from dflop.base import UserError
from dflop.config import load_config
from dflop.models import family_names, load_model_spec, load_runtime


def build(module: str = "llm", layers: range = range(4), dtype: torch.dtype = torch.float32, **lora: object):
    """A stage of the tiny LLaVA-OneVision with adapters."""
    config = load_config({"model": {"lora": lora}})
    runtime = load_runtime("llava_onevision")
    hf_config = runtime.make_config(load_model_spec(config.model), {}, 0)
    return runtime.build_stage(hf_config, module, layers=layers, seed=3, dtype=dtype, trained=config.model.trained)


def refusal(family: str, **lora: object) -> str:
    config = load_config({"model": {"family": family, "lora": lora}})
    spec, runtime = load_model_spec(config.model), load_runtime(family)
    with pytest.raises(UserError) as caught:
        runtime.check_trained(spec, runtime.make_config(spec, {}, 0), config.model.trained)
    return str(caught.value)


def test_adapters_are_all_that_is_trained_of_what_the_patterns_match():
    stage = build(targets=["*.q_proj", "*.3.mlp.*"]).train_those(lambda name: False)
    trained = {name for name, parameter in stage.named_hf_parameters().items() if parameter.requires_grad}
    of_linear = {name.partition(".lora_")[0].removeprefix("model.language_model.layers.") for name in trained}
    mlp = {"3.mlp.gate_proj", "3.mlp.up_proj", "3.mlp.down_proj"}
    assert of_linear == {f"{layer}.self_attn.q_proj" for layer in range(4)} | mlp
    assert len(trained) == 2 * len(of_linear)
    assert not any("lora" in name for name in build("vision").named_hf_parameters())


def test_a_stage_of_any_layers_begins_with_the_same_adapters_which_change_nothing():
    whole, part = build(rank=4).hf_state_dict(), build(rank=4, layers=range(1, 3)).hf_state_dict()
    assert any("lora_A" in name for name in part)
    for name, values in part.items():
        assert torch.equal(values, whole[name])
        if "lora_A" in name:  # as peft draws them: evenly up to 1/sqrt(num_inputs)
            assert 0.8 < values.abs().max() * values.shape[1] ** 0.5 <= 1
        assert "lora_B" not in name or not values.any()


def test_adapters_of_weights_in_bf16_are_held_in_fp32_and_so_are_rotary_frequencies():
    stage = build(dtype=torch.bfloat16)
    dtypes = {name: values.dtype for name, values in stage.hf_state_dict().items()}
    assert all(dtype == (torch.float32 if "lora_" in name else torch.bfloat16) for name, dtype in dtypes.items())
    frequencies = dict(stage.hf.named_buffers())["model.language_model.rotary_emb.inv_freq"]
    exact = dict(build().hf.named_buffers())["model.language_model.rotary_emb.inv_freq"]
    assert torch.equal(frequencies, exact)
    assert frequencies.dtype == torch.float32


@pytest.mark.parametrize("family", family_names())
def test_a_pattern_that_matches_no_linear_layer_is_refused(family):
    assert (
        "`model.lora.targets[1]` is '*.query', which matches nothing in the layers of llm; it is a pattern"
        in refusal(family, targets=["*", "*.query"])
    )
    message = refusal(family, targets=["*.input_layernorm"])
    assert "matches model.language_model.layers.0.input_layernorm, a " in message
    assert "and no linear layer" in message
    assert "matches nothing in the layers of llm" in refusal(family, targets=["lm_head"])


def test_a_module_in_which_no_pattern_matches_is_refused():
    message = refusal("llava_onevision", modules=["llm", "vision.encoder"], targets=["*.gate_proj"])
    assert "match no linear layer of vision, which is in `model.lora.modules`; it has fc1, fc2, k_proj" in message
