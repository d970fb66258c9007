"""A spec comes from a preset or a checkpoint of any family; what cannot be loaded or run says so, with the way out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from dflop.base import UserError
from dflop.config import LoraConfig, ModelConfig
from dflop.models import able_tp_sizes, check_runnable, family_names, family_of, load_model_spec, weights_digest

FAMILIES = {name: family_of(name) for name in family_names()}


@pytest.fixture
def checkpoint(tmp_path):
    """`checkpoint("config.json", fields)` writes a file of a checkpoint and returns its folder."""

    def write(name: str, fields: object) -> Path:
        (tmp_path / name).write_text(json.dumps(fields), encoding="utf-8")
        return tmp_path

    return write


def refusal(**model) -> str:
    with pytest.raises(UserError) as caught:
        load_model_spec(ModelConfig(**model))
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_is_found_by_its_family(family):
    for preset in FAMILIES[family].presets:
        spec = load_model_spec(ModelConfig(family=family, preset=preset))
        assert (spec.family, spec.name) == (family, preset)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_read_as_the_preset_with_the_same_fields_would_be(family, checkpoint):
    fields = FAMILIES[family].presets["tiny"]
    folder = checkpoint("config.json", fields)
    spec = load_model_spec(ModelConfig(family=family, path=str(folder)))
    preset = FAMILIES[family].make_spec("tiny", fields, {})
    assert spec.name == folder.name
    assert (spec.rules, spec.modules, spec.hf_config) == (preset.rules, preset.modules, fields)


def test_a_preset_or_family_that_is_not_there_lists_those_that_are():
    assert refusal(family="internvl", preset="llava_ov_7b") == (
        f"`model.preset` is 'llava_ov_7b'; internvl has {', '.join(FAMILIES['internvl'].presets)}"
    )
    assert f"must be one of {', '.join(FAMILIES)}" in refusal(family="qwen_vl")


def test_what_is_frozen_must_be_a_module_of_the_model_and_not_all_of_them():
    assert load_model_spec(ModelConfig(freeze=["vision"]))
    assert load_model_spec(ModelConfig(freeze=["vision.encoder", "llm"]))
    assert "`model.freeze[1]` is 'eyes'; it must be one of vision, llm, vision.encoder" in refusal(
        freeze=["vision", "eyes"]
    )
    assert "`model.freeze[0]` is 'llm.encoder'" in refusal(freeze=["llm.encoder"])
    for everything in (["vision", "llm"], ["vision.encoder", "vision", "llm"]):
        assert "`model.freeze` names all that would be trained" in refusal(freeze=everything)


def test_adapters_are_of_the_llm_or_of_encoders_without_their_projectors():
    assert load_model_spec(ModelConfig(lora=LoraConfig(modules=["vision.encoder", "llm"]), freeze=["vision", "llm"]))
    message = refusal(lora=LoraConfig(modules=["llm", "vision"]))
    assert message == "`model.lora.modules[1]` is 'vision'; it must be one of vision.encoder, llm"


def test_a_checkpoint_of_another_family_names_the_family(checkpoint):
    folder = str(checkpoint("config.json", {"model_type": "internvl"}))
    message = refusal(path=folder)
    assert f"`model.path` {folder} holds a 'internvl' model, but `model.family` is 'llava_onevision'" in message
    assert message.endswith("use `model.family: internvl`")
    checkpoint("config.json", {"model_type": "internvl_chat"})
    assert refusal(family="internvl", path=folder).endswith("use the checkpoint of InternVL whose name ends in -hf")
    checkpoint("config.json", {"model_type": "llava"})
    assert refusal(family="internvl", path=folder).endswith(
        f"known are {', '.join(FAMILIES)}; dflop/models/README.md says how to add another"
    )


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, checkpoint):
    message = refusal(path=str(tmp_path))
    assert "it has no config.json" in message
    assert "name the folder that `save_pretrained` wrote" in message
    hub = refusal(path="Qwen/Qwen2.5-VL-7B-Instruct")
    assert "download a model of the Hub with `hf download Qwen/Qwen2.5-VL-7B-Instruct --local-dir FOLDER`" in hub
    (tmp_path / "weights.bin").touch()
    assert "weights.bin is not a Hugging Face checkpoint directory" in refusal(path=str(tmp_path / "weights.bin"))
    checkpoint("config.json", ["a list"])
    assert "config.json holds a list" in refusal(path=str(tmp_path))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "config.json cannot be read" in refusal(path=str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_without_the_llms_sizes_names_the_field(family, checkpoint):
    folder = checkpoint("config.json", {"model_type": family, "text_config": {"num_hidden_layers": 2}})
    assert refusal(family=family, path=str(folder)).endswith("has no `text_config.hidden_size`")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"preprocessor_config.json": {"min_patches": 2, "max_patches": 6}},
        {"processor_config.json": {"image_processor": {"max_patches": 7}}},
        {
            "processor_config.json": {"image_processor": {"max_patches": 7}},
            "preprocessor_config.json": {"min_patches": 2, "max_patches": 6},
        },
        {"processor_config.json": {"image_seq_length": 4}, "preprocessor_config.json": {"max_patches": 6}},
    ],
)
def test_the_numbers_of_tiles_are_those_of_the_image_processor_that_transformers_loads(checkpoint, files):
    folder = checkpoint("config.json", FAMILIES["internvl"].presets["tiny"])
    for name, fields in files.items():
        checkpoint(name, fields)
    rules = load_model_spec(ModelConfig(family="internvl", path=str(folder))).rules
    processor = GotOcr2ImageProcessorPil.from_pretrained(folder) if files else GotOcr2ImageProcessorPil()
    assert (rules.min_tiles, rules.max_tiles) == (processor.min_patches, processor.max_patches)


@pytest.mark.parametrize(
    ("family", "file", "fields", "said"),
    [
        ("internvl", "preprocessor_config.json", {"size": {"height": 448, "width": 448}}, "`size` {"),
        (
            "internvl",
            "processor_config.json",
            {"image_seq_length": 256},
            "`image_seq_length` 256, but by its config.json",
        ),
        ("llava_onevision", "processor_config.json", {"image_processor": {"size": {"shortest_edge": 84}}}, "`size` {"),
        ("llava_onevision", "preprocessor_config.json", {"image_grid_pinpoints": [[84, 84]]}, "`image_grid_pinpoints`"),
        ("llava_onevision", "processor_config.json", {"vision_feature_select_strategy": "default"}, 'is "full"'),
    ],
)
def test_a_processor_that_contradicts_the_config_is_refused(checkpoint, family, file, fields, said):
    checkpoint("config.json", FAMILIES[family].presets["tiny"])
    message = refusal(family=family, path=str(checkpoint(file, fields)))
    assert said in message
    assert message.endswith("take both from one checkpoint")
    assert "\n" not in message


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("has_head", [False, True])
def test_a_config_that_does_not_say_whether_the_head_is_the_embedding_leaves_it_to_the_tensors(
    checkpoint, has_head, sharded
):
    fields = {key: value for key, value in FAMILIES["internvl"].presets["tiny"].items() if key != "tie_word_embeddings"}
    folder = checkpoint("config.json", fields)
    names = ["language_model.model.embed_tokens.weight", *(["language_model.lm_head.weight"] if has_head else [])]
    if sharded:
        checkpoint("model.safetensors.index.json", {"weight_map": dict.fromkeys(names, "model-1-of-1.safetensors")})
    save_file({name: torch.zeros(1) for name in names}, folder / "model-1-of-1.safetensors")
    spec = load_model_spec(ModelConfig(family="internvl", path=str(folder)))
    assert spec.has_tied_head == (not has_head)


def test_a_feature_of_another_layer_is_refused(checkpoint):
    folder = checkpoint("config.json", FAMILIES["internvl"].presets["tiny"] | {"vision_feature_layer": -2})
    assert refusal(family="internvl", path=str(folder)).endswith("has `vision_feature_layer` -2; only -1 is known")


def test_a_number_of_tiles_that_is_none_is_refused(checkpoint):
    checkpoint("config.json", FAMILIES["internvl"].presets["tiny"])
    folder = checkpoint("preprocessor_config.json", {"max_patches": None})
    assert refusal(family="internvl", path=str(folder)).endswith("has `max_patches` None; it must be a whole number")


def test_the_grids_are_those_of_the_image_processor_where_the_config_names_none(checkpoint):
    fields = {
        key: value
        for key, value in FAMILIES["llava_onevision"].presets["tiny"].items()
        if key != "image_grid_pinpoints"
    }
    folder = checkpoint("config.json", fields)
    size = {"height": 84, "width": 84}
    LlavaOnevisionImageProcessorPil(image_grid_pinpoints=[[84, 168], [168, 84]], size=size).save_pretrained(folder)
    assert load_model_spec(ModelConfig(path=str(folder))).rules.grid_pinpoints == ((84, 168), (168, 84))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_run(family):
    check_runnable(family)


def test_a_family_of_which_only_the_shapes_are_known_says_what_can_be_run(made_up, checkpoint):
    with pytest.raises(UserError) as caught:
        check_runnable(made_up)
    message = str(caught.value)
    assert "`model.family` is 'made_up', which cannot be measured or trained yet" in message
    assert "Its shapes can be profiled" in message
    assert message.endswith(f"For costs, plans and training, use `model.family: {' or '.join(FAMILIES)}`")
    folder = str(checkpoint("config.json", {"model_type": made_up}))
    limits = "(for shapes only)"
    assert refusal(path=folder).endswith(f"use `model.family: made_up` {limits}")


def test_each_module_has_the_tensor_parallel_sizes_that_divide_its_heads(tiny_spec):
    vision, llm = tiny_spec.modules
    spec = replace(
        tiny_spec, modules=(replace(vision, num_heads=9, num_kv_heads=9), replace(llm, num_heads=16, num_kv_heads=4))
    )
    assert able_tp_sizes(spec, [1, 2, 3, 8]) == {"vision": [1, 3], "llm": [1, 2]}
    with pytest.raises(UserError, match=r"tp=2 does not divide vision's 9 attention heads.*use one of 1, 3, 9"):
        able_tp_sizes(spec, [2, 4])


def test_weights_of_which_one_small_tensor_is_another_have_another_digest(tmp_path):
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, value in zip(folders, (0.0, 0.0, 1.0), strict=True):
        folder.mkdir()
        save_file({"llm": torch.zeros(100_000), "projector": torch.full((3,), value)}, folder / "model.safetensors")
    one, two, three = map(weights_digest, folders)
    assert one == two != three
    (folders[0] / "model.safetensors").unlink()
    assert not weights_digest(folders[0])
    (folders[0] / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"model\.safetensors is no safetensors file"):
        weights_digest(folders[0])
