"""The learning rate over a run, beside transformers' own schedules."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from dflop.base import UserError
from dflop.config import TrainConfig, load_config
from dflop.train.learning_rate import lr_factor


@pytest.mark.parametrize(
    ("name", "theirs"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_behind_the_warm_up_the_rate_is_that_of_transformers(name, theirs):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = theirs(optimizer, 3, 20)
    config = TrainConfig(lr_schedule=name, warmup_steps=3, steps=20)
    for step in range(20):
        if step >= 3:
            assert lr_factor(config, step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()


def test_the_rate_rises_to_one_and_goes_down_to_the_least():
    config = TrainConfig(lr_schedule="linear", warmup_steps=2, steps=6, min_lr_ratio=0.2)
    assert [lr_factor(config, step) for step in range(8)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    constant = TrainConfig(warmup_steps=2, steps=6, min_lr_ratio=0.2)
    assert [lr_factor(constant, step) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_a_module_has_its_own_rate_and_decay_or_those_of_all():
    config = load_config({"train": {"lr": 1e-3, "weight_decay": 0.1, "modules": {"vision": {"lr": 2e-6}}}})
    assert config.train.of_part("vision.encoder.layers.0.mlp.fc1.weight") == (2e-6, 0.1)
    assert config.train.of_part("llm.norm.weight") == (1e-3, 0.1)
    assert load_config("train.modules.llm.weight_decay=0").train.of_part("llm.norm.weight") == (1e-4, 0.0)


def test_of_several_names_for_a_part_the_last_counts():
    names = {"vision": {"lr": 2e-6, "weight_decay": 0.2}, "projector": {"lr": 1e-3}, "llm.layers.[10-12]": {"lr": 5e-5}}
    train = load_config({"train": {"lr": 1e-5, "modules": names}}).train
    parts = ("vision.encoder.embeddings.x", "vision.projector.linear_1.weight", "llm.layers.11.x", "llm.layers.1.x")
    assert [train.of_part(name) for name in parts] == [(2e-6, 0.2), (1e-3, 0.2), (5e-5, 0.01), (1e-5, 0.01)]


@pytest.mark.parametrize(
    ("train", "complaint"),
    [
        ({"lr_schedule": "step"}, "`train.lr_schedule` is 'step'; it must be one of constant, linear, cosine"),
        ({"min_lr_ratio": 1.5}, "`train.min_lr_ratio` is 1.5; it must be from 0 to 1"),
        ({"modules": {"vision": {"lr": 0.0}}}, "`train.modules.vision.lr` is 0.0; it must be above 0"),
        ({"modules": {"vision": {"lr": "fast"}}}, "`train.modules.vision.lr` is 'fast'; it must be a number"),
        ({"modules": {"vision": {"rate": 1}}}, "unknown key `train.modules.vision.rate`"),
        ({"modules": {"vision": 1e-4}}, "`train.modules.vision` is 0.0001; it must hold the keys lr, weight_decay"),
        ({"modules": ["vision"]}, r"`train.modules` is \['vision'\]; it must hold names, each with lr, weight_decay"),
    ],
)
def test_what_cannot_be_a_schedule_or_a_modules_rate_is_named(train, complaint):
    with pytest.raises(UserError, match=complaint):
        load_config({"train": train})
