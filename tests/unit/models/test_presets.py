"""Presets are configs that transformers understands, of models that have the sizes they are named for."""

import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dflop.models import family_names, family_of
from dflop.models.presets import LLMS

CONFIG_README = Path(__file__).parents[3] / "config" / "README.md"
FAMILIES = {name: family_of(name) for name in family_names()}
PRESETS = [(family, name) for family, own in FAMILIES.items() for name in own.presets]


def config_of(family: str, name: str):
    fields = dict(FAMILIES[family].presets[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


# Parameters of the whole models.
SIZES = {
    "llava_ov_0.5b": 893_675_552,
    "llava_ov_7b": 8_029_890_080,
    "llava_ov_72b": 73_181_570_592,
    "siglip_llama3_8b": 8_449_517_088,
    "siglip_llama3_70b": 71_028_024_864,
    "internvl_2b": 2_088_957_440,
    "internvl_8b": 7_944_373_760,
    "internvl_38b": 38_388_164_992,
    "internvl_78b": 78_408_318_336,
    "internvit_300m_llama3_8b": 8_367_844_352,
    "internvit_6b_llama3_70b": 76_262_210_944,
    "qwen2_5_vl_3b": 3_754_622_976,
    "qwen2_5_omni_3b": 4_703_464_448,
    "qwen2_5_omni_7b": 8_931_813_888,
    "qwen3_vl_2b": 2_127_532_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen2_5_vl_32b": 33_452_718_336,
    "qwen2_5_vl_72b": 73_410_777_344,
}

# The released LLMs' numbers of parameters, 1.5B with its embedding as its head.
RELEASED = {
    "qwen2_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_32b": 32_763_876_352,
    "qwen2_72b": 72_706_203_648,
    "qwen2.5_72b": 72_706_203_648,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
}


@pytest.mark.parametrize(("family", "name"), [entry for entry in PRESETS if entry[1] != "tiny"])
def test_a_preset_has_as_many_parameters_as_the_model_it_is_named_after(family, name):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config_of(family, name))
    assert num_parameters(model) == SIZES[name]


@pytest.mark.parametrize("name", LLMS)
def test_an_llm_has_the_parameters_of_the_released_one(name):
    fields = dict(LLMS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert num_parameters(model) == RELEASED[name]


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("family", "name"), PRESETS)
def test_building_a_model_leaves_the_presets_as_they_are(family, name):
    before = deepcopy(FAMILIES[family].presets)  # presets share the fields of their encoders and LLMs
    with torch.device("meta"):
        AutoModelForImageTextToText.from_config(config_of(family, name))
    assert before == FAMILIES[family].presets


@pytest.mark.parametrize(("family", "name"), PRESETS)
def test_transformers_gives_every_field_of_a_preset_back(family, name):
    config = config_of(family, name)
    assert config.model_type == family
    for key, value in FAMILIES[family].presets[name].items():
        if isinstance(value, dict):
            section = getattr(config, key)
            assert {field: getattr(section, field) for field in value} == value
        else:
            assert getattr(config, key) == value, key


def test_every_preset_is_named_in_the_configs_readme():
    (line,) = [line for line in CONFIG_README.read_text().splitlines() if line.startswith("| `model.preset` |")]
    for family, own in FAMILIES.items():
        named = line[line.index(f"{family} (") :].split(": ", 1)[1].split("; ")[0]
        assert re.findall("`([^`]+)`", named) == list(own.presets)


@pytest.mark.parametrize(("family", "name"), PRESETS)
def test_the_spec_of_a_preset_has_the_sizes_of_its_config(family, name):
    spec = FAMILIES[family].make_spec(name, FAMILIES[family].presets[name], {})
    config = config_of(family, name)
    assert (spec.family, spec.name) == (family, name)
    assert spec.has_tied_head or not config.tie_word_embeddings
    assert [module.name for module in spec.modules] in (["vision", "llm"], ["vision", "audio", "llm"])
    for module in spec.modules:
        part = config.text_config if module.name == "llm" else getattr(config, f"{module.name}_config")
        assert (module.num_layers, module.hidden_size) == (part.num_hidden_layers, part.hidden_size)
        assert module.num_heads == part.num_attention_heads
        assert module.num_kv_heads == getattr(part, "num_key_value_heads", part.num_attention_heads)
