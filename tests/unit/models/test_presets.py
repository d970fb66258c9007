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


def linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return inputs * outputs + bias * outputs


def llm(*, hidden: int, inner: int, num_layers: int, kv: int, vocab: int, bias: bool, heads: int = 2) -> int:
    """`kv` is the width of keys and values, `heads` the matrices over the vocabulary: the embedding and the head."""
    attention = linear(hidden, hidden, bias=bias) + 2 * linear(hidden, kv, bias=bias) + hidden * hidden
    layer = attention + 3 * hidden * inner + 2 * hidden  # three matrices of the MLP, and a gain for each RMSNorm
    return heads * vocab * hidden + num_layers * layer + hidden


def qwen_0_5b(vocab: int) -> int:
    return llm(hidden=896, inner=4864, num_layers=24, kv=2 * 64, vocab=vocab, bias=True, heads=1)


def qwen_1_5b(vocab: int, heads: int = 2) -> int:
    return llm(hidden=1536, inner=8960, num_layers=28, kv=2 * 128, vocab=vocab, bias=True, heads=heads)


def qwen_7b(vocab: int) -> int:
    return llm(hidden=3584, inner=18944, num_layers=28, kv=4 * 128, vocab=vocab, bias=True)


def qwen_32b(vocab: int) -> int:
    return llm(hidden=5120, inner=27648, num_layers=64, kv=8 * 128, vocab=vocab, bias=True)


def qwen_72b(vocab: int) -> int:
    return llm(hidden=8192, inner=29568, num_layers=80, kv=8 * 128, vocab=vocab, bias=True)


LLAMA_8B = llm(hidden=4096, inner=14336, num_layers=32, kv=8 * 128, vocab=128_256, bias=False)
LLAMA_70B = llm(hidden=8192, inner=28672, num_layers=80, kv=8 * 128, vocab=128_256, bias=False)


def vision_layer(hidden: int, inner: int) -> int:
    """Four square matrices, two of the MLP, all with biases, and two LayerNorms."""
    return 4 * linear(hidden, hidden) + linear(hidden, inner) + linear(inner, hidden) + 4 * hidden


def siglip(out: int) -> int:
    """SigLIP so400m, its projector to the LLM's width, and the newline."""
    # Patches of 14 x 14 in 27 x 27 places, 26 of the 27 layers, a last LayerNorm; no pooling head.
    vision = linear(3 * 14 * 14, 1152) + 27 * 27 * 1152 + 26 * vision_layer(1152, 4304) + 2 * 1152
    return vision + linear(1152, out) + linear(out, out) + out


def internvit(hidden: int, layers: int, out: int) -> int:
    """InternViT and its projector; pixel shuffle puts 2 x 2 patches side by side."""
    # A class token and 32 x 32 places; mean pooling leaves no last LayerNorm.
    vision = linear(3 * 14 * 14, hidden) + hidden + (32 * 32 + 1) * hidden + layers
    return vision + 2 * 4 * hidden + linear(4 * hidden, out) + linear(out, out)


def internvit_300m(out: int) -> int:
    return internvit(1024, 24 * (vision_layer(1024, 4096) + 2 * 1024), out)  # two scales a layer


def internvit_6b(out: int) -> int:
    # Without biases of queries, keys and values, but with a gain for each of two norms, queries, keys; two scales.
    layer = 4 * 3200 * 3200 + 3200 + linear(3200, 12800) + linear(12800, 3200) + 4 * 3200 + 2 * 3200
    return internvit(3200, 45 * layer, out)


def qwen_vision(inner: int, out: int) -> int:
    """The vision transformer of Qwen2.5-VL and its merger of 2 x 2 patches."""
    layer = linear(1280, 3 * 1280) + linear(1280, 1280) + 2 * linear(1280, inner) + linear(inner, 1280) + 2 * 1280
    return 3 * 2 * 14 * 14 * 1280 + 32 * layer + 1280 + linear(5120, 5120) + linear(5120, out)


def qwen3_vision(hidden: int, inner: int, num_layers: int, out: int) -> int:
    """The vision transformer of Qwen3-VL over a grid of 48 x 48 positions, and four mergers of 2 x 2 patches: the norm
    of one is over a patch, those of the others over what is merged."""
    mergers = 4 * (linear(4 * hidden, 4 * hidden) + linear(4 * hidden, out)) + 2 * hidden + 3 * 8 * hidden
    return linear(3 * 2 * 16 * 16, hidden) + 48 * 48 * hidden + num_layers * vision_layer(hidden, inner) + mergers


def qwen3(*, hidden: int, inner: int, num_layers: int, num_heads: int, heads: int = 2) -> int:
    """Queries are wider than the hidden states or as wide; each head's queries and keys have a norm of their own."""
    query, kv = num_heads * 128, 8 * 128
    layer = 2 * hidden * (query + kv) + 2 * 128 + 3 * hidden * inner + 2 * hidden
    return heads * 151_936 * hidden + num_layers * layer + hidden


def qwen_audio(out: int) -> int:
    """Whisper's encoder over 128 mel bins, whose keys have no bias, the matrix to the LLM's width, and two vectors."""
    layers = 32 * (vision_layer(1280, 5120) - 1280)
    return linear(3 * 128, 1280) + linear(3 * 1280, 1280) + layers + 2 * 1280 + linear(1280, out) + 2 * out


# By the formulas above, and the number that comes out.
SIZES = {
    "llava_ov_0.5b": (siglip(896) + qwen_0_5b(152_000), 893_675_552),
    "llava_ov_7b": (siglip(3584) + qwen_7b(152_000), 8_029_890_080),
    "llava_ov_72b": (siglip(8192) + qwen_72b(152_128), 73_181_570_592),
    "siglip_llama3_8b": (siglip(4096) + LLAMA_8B, 8_449_517_088),
    "siglip_llama3_70b": (siglip(8192) + LLAMA_70B, 71_028_024_864),
    "internvl_2b": (internvit_300m(1536) + qwen_1_5b(151_674), 2_088_957_440),
    "internvl_8b": (internvit_300m(3584) + qwen_7b(151_674), 7_944_373_760),
    "internvl_38b": (internvit_6b(5120) + qwen_32b(151_674), 38_388_164_992),
    "internvl_78b": (internvit_6b(8192) + qwen_72b(151_674), 78_408_318_336),
    "internvit_300m_llama3_8b": (internvit_300m(4096) + LLAMA_8B, 8_367_844_352),
    "internvit_6b_llama3_70b": (internvit_6b(8192) + LLAMA_70B, 76_262_210_944),
    "qwen2_5_vl_3b": (
        qwen_vision(3420, 2048)
        + llm(hidden=2048, inner=11008, num_layers=36, kv=2 * 128, vocab=151_936, bias=True, heads=1),
        3_754_622_976,
    ),
    "qwen2_5_omni_3b": (
        qwen_vision(3420, 2048)
        + qwen_audio(2048)
        + llm(hidden=2048, inner=11008, num_layers=36, kv=2 * 128, vocab=151_936, bias=True),
        4_703_464_448,
    ),
    "qwen2_5_omni_7b": (qwen_vision(3420, 3584) + qwen_audio(3584) + qwen_7b(152_064), 8_931_813_888),
    "qwen3_vl_2b": (
        qwen3_vision(1024, 4096, 24, 2048) + qwen3(hidden=2048, inner=6144, num_layers=28, num_heads=16, heads=1),
        2_127_532_032,
    ),
    "qwen3_vl_4b": (
        qwen3_vision(1024, 4096, 24, 2560) + qwen3(hidden=2560, inner=9728, num_layers=36, num_heads=32, heads=1),
        4_437_815_808,
    ),
    "qwen3_vl_8b": (
        qwen3_vision(1152, 4304, 27, 4096) + qwen3(hidden=4096, inner=12288, num_layers=36, num_heads=32),
        8_767_123_696,
    ),
    "qwen3_vl_32b": (
        qwen3_vision(1152, 4304, 27, 5120) + qwen3(hidden=5120, inner=25600, num_layers=64, num_heads=64),
        33_357_390_064,
    ),
    "qwen2_5_vl_7b": (qwen_vision(3420, 3584) + qwen_7b(152_064), 8_292_166_656),
    "qwen2_5_vl_32b": (qwen_vision(3456, 5120) + qwen_32b(152_064), 33_452_718_336),
    "qwen2_5_vl_72b": (qwen_vision(3456, 8192) + qwen_72b(152_064), 73_410_777_344),
}

# The released LLMs' numbers of parameters, 1.5B with its embedding as its head.
RELEASED = {
    "qwen2_0.5b": (qwen_0_5b(151_936), 494_032_768),
    "qwen2.5_1.5b": (qwen_1_5b(151_936, heads=1), 1_543_714_304),
    "qwen2_7b": (qwen_7b(152_064), 7_615_616_512),
    "qwen2.5_7b": (qwen_7b(152_064), 7_615_616_512),
    "qwen2.5_32b": (qwen_32b(152_064), 32_763_876_352),
    "qwen2_72b": (qwen_72b(152_064), 72_706_203_648),
    "qwen2.5_72b": (qwen_72b(152_064), 72_706_203_648),
    "llama3_8b": (LLAMA_8B, 8_030_261_248),
    "llama3_70b": (LLAMA_70B, 70_553_706_496),
}


@pytest.mark.parametrize(("family", "name"), [entry for entry in PRESETS if entry[1] != "tiny"])
def test_a_preset_has_the_parameters_that_its_structure_gives(family, name):
    by_formula, number = SIZES[name]
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config_of(family, name))
    assert num_parameters(model) == by_formula == number


@pytest.mark.parametrize("name", LLMS)
def test_an_llm_has_the_parameters_of_the_released_one(name):
    by_formula, number = RELEASED[name]
    fields = dict(LLMS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert num_parameters(model) == by_formula == number


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
