"""Runs that train parts, or adapters, go on where they stopped, on other ranks, too; what is frozen stays as it was."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import plan_file, train
from whole_model import build_whole_model

from dflop.config import load_config
from dflop.shapes.text import BUNDLED_TOKENIZER

pytestmark = pytest.mark.serial

# What is trained, and what names of trained tensors contain.
MODELS = {
    "patterns": ({"train": ["projector", "llm.layers.[2-3]", "llm.head"]}, ("projector", ".2.", ".3.", "lm_head")),
    "adapters": (
        {"train": ["projector"], "lora": {"targets": ["*.q_proj", "*.up_proj"], "rank": 4}},
        ("projector", ".q_proj.weight", ".up_proj.weight"),
    ),
}


# A run with adapters goes on in another layout in the tests of training, too.
@pytest.mark.parametrize("name", ["patterns", pytest.param("adapters", marks=pytest.mark.exhaustive)])
def test_a_resumed_run_of_parts_ends_with_the_same_weights_on_another_number_of_ranks(run, name, tmp_path):
    (folder, config), (model, trained) = run, MODELS[name]
    base, whole = tmp_path / "base", build_whole_model(load_config(config))
    whole.save_pretrained(base)
    for file in filter(Path.is_file, BUNDLED_TOKENIZER.iterdir()):
        shutil.copy(file, base)
    config = config | {"model": {"path": str(base)} | model}
    two, three = plan_file(folder), plan_file(folder, llm_dp=2, sharding="parameters")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(folder, config, two, straight, steps=4)
    train(folder, config, two, resumed, steps=2)
    (resumed / "model").rename(tmp_path / "halfway")
    train(folder, config, three, resumed, steps=4)
    assert "going on from" in (resumed / "log").read_text()
    before, folders = whole.state_dict(), (tmp_path / "halfway", straight / "model", resumed / "model")
    halfway, once, twice = map(_weights, folders)
    assert before.keys() == once.keys() == twice.keys()
    for key, values in before.items():
        if "language_model" in key or "lm_head" in key or "projector" in key:
            is_trained = any(part in key for part in trained)
        else:
            is_trained = "image_newline" in key
        assert torch.equal(values, once[key]) != is_trained, key
        assert torch.equal(halfway[key], once[key]) != is_trained, key
        assert torch.equal(values, twice[key]) != is_trained, key
        assert (once[key] - twice[key]).abs().max() < 1e-9, key
    if name == "adapters":
        once, twice = (load_file(out / "adapter/adapter_model.safetensors") for out in (straight, resumed))
        assert once.keys() == twice.keys()
        assert all((values - twice[key]).abs().max() < 1e-9 for key, values in once.items())


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {key: own for file in folder.glob("*.safetensors") for key, own in load_file(file).items()}
