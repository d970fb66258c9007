"""Directories of adapters, as peft saves them, that training goes on from, and those that do not fit the model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflop.base import UserError
from dflop.config import load_config
from dflop.models import check_adapter, load_model_spec, load_runtime

peft = pytest.importorskip("peft")

LORA = {"modules": ["llm"], "targets": ["*.q_proj", "*.up_proj"], "rank": 4, "alpha": 6.0}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """As peft saves one: of queries and a projection of the LLM, beside a projector that was trained as a whole."""
    folder = tmp_path_factory.mktemp("peft")
    spec, runtime = load_model_spec(load_config({}).model), load_runtime("llava_onevision")
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=r".*language_model.*\.(q_proj|up_proj)",
        modules_to_save=["multi_modal_projector"],
        init_lora_weights=False,  # so that lora_B is not zero
    )
    peft.get_peft_model(runtime.architecture(runtime.make_config(spec, {}, 0)), settings).save_pretrained(folder)
    return folder


def check(folder: Path, family: str = "llava_onevision", lora: dict | None = LORA, **model: object) -> None:
    config = load_config({"model": {"family": family, "adapter": str(folder), "lora": lora} | model})
    check_adapter(load_model_spec(config.model), config.model)


def changed(folder: Path, made: Path, **settings: object) -> Path:
    """A copy of an adapter with other settings."""
    own = json.loads((folder / "adapter_config.json").read_text()) | settings
    (made / "adapter_config.json").write_text(json.dumps(own))
    (made / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_read", [False, True], ids=["drawn", "read"])
def test_a_stage_begins_with_pefts_values_beside_the_base_models(adapter, dtype, is_read, tmp_path):
    check(adapter)
    config, runtime = load_config({"model": {"lora": LORA}}), load_runtime("llava_onevision")
    hf_config = runtime.make_config(load_model_spec(config.model), {}, 0)
    if is_read:
        runtime.architecture(hf_config).save_pretrained(tmp_path)
    how = {"checkpoint": tmp_path if is_read else None, "seed": 3, "dtype": dtype, "trained": config.model.trained}
    stored = load_file(adapter / "adapter_model.safetensors")
    num_found = 0
    for module, layers in (("vision", range(4)), ("llm", range(2)), ("llm", range(2, 4))):
        base, ours = (
            runtime.build_stage(hf_config, module, layers=layers, adapter=own, **how).hf_state_dict()
            for own in (None, adapter)
        )
        for name, values in ours.items():
            theirs = stored.get(f"base_model.model.{name}")
            num_found += theirs is not None
            assert torch.equal(values, base[name] if theirs is None else theirs.to(values.dtype)), name
            assert values.dtype == (torch.float32 if "lora_" in name else base[name].dtype)
    assert num_found == len(stored)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"r": 8}, r"`model\.lora\.rank` is 4, but the adapter .* was made with `r` 8; they must be equal"),
        ({"lora_alpha": 16}, r"`model\.lora\.alpha` is 6\.0, but the adapter .* was made with `lora_alpha` 16"),
        ({"use_rslora": True}, r"`model\.lora\.rslora` is false, but .* `use_rslora` true"),
        ({"peft_type": "IA3"}, r"has `peft_type` \"IA3\"; only LoRA"),
        ({"use_dora": True}, r"has `use_dora` true; only LoRA"),
        ({"lora_bias": True}, r"has `lora_bias` true; only LoRA"),
        ({"init_lora_weights": "pissa"}, r"has `init_lora_weights` \"pissa\", which changed the base model's weights"),
        ({"rank_pattern": {"q_proj": 2}}, r"has `rank_pattern` \{\"q_proj\": 2\}; only LoRA with one rank"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(adapter, settings, said, tmp_path):
    with pytest.raises(UserError, match=said):
        check(changed(adapter, tmp_path, **settings))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"lora": None}, r"`model\.lora` is not; set it to \{rank: 4, alpha: 6\}, and its modules"),
        ({"family": "qwen2_5_vl"}, "is for another model: it holds .*projector.linear_1.bias"),
        (
            {"lora": LORA | {"targets": ["*.q_proj"]}},
            r'`targets`, in the right `modules`, are \["\*\.q_proj", "\*\.up_',
        ),
        (
            {"lora": LORA | {"targets": ["*"]}},
            r"does not adapt; set them to what it does: \[\"\*\.q_proj\", \"\*\.up_p",
        ),
        ({"lora": LORA | {"modules": ["vision.encoder"]}}, r"adapts model\.language_model\..* `modules`"),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_refused(adapter, model, said):
    with pytest.raises(UserError, match=said):
        check(adapter, **model)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("extra.weight", (2,), r"another model: it holds model\.extra\.weight, which this one does not have"),
        ("multi_modal_projector.linear_1.bias", (2,), r"linear_1\.bias of shape \[2\], and here that has \[\d+\]"),
        (
            "language_model.layers.9.mlp.up_proj.lora_A.weight",
            (4, 8),
            r"this one has no layer model\..*9\.mlp\.up_proj",
        ),
    ],
)
def test_an_adapter_with_a_tensor_that_is_not_the_models_is_refused(adapter, name, shape, said, tmp_path):
    folder, values = changed(adapter, tmp_path), load_file(adapter / "adapter_model.safetensors")
    save_file(values | {f"base_model.model.model.{name}": torch.ones(shape)}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=said):
        check(folder)


def test_a_folder_that_is_no_adapter_is_refused(adapter, tmp_path):
    with pytest.raises(UserError, match=r"holds no adapter_config\.json; of a run the adapters are in train/adapter"):
        check(tmp_path)
    changed(adapter, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no adapter_model\.safetensors; save it anew with peft's"):
        check(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0cut off")
    with pytest.raises(UserError, match="is no safetensors file, or it is cut off"):
        check(tmp_path)
