"""The loss on held-out samples: that of the plain model, whatever the layout, and nothing that training notices."""

import shutil

import duckdb
import pytest
import torch
from training_runs import plan_file, train
from transformers import LlavaOnevisionForConditionalGeneration
from whole_model import build_whole_model, loss_of_batch

from dflop.config import load_config
from dflop.models import load_model_spec
from dflop.shapes import load_samples

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def held_out(run, tmp_path_factory):
    """The run's folder with a dozen samples held out, and its config, which says so."""
    folder, config = run
    own = tmp_path_factory.mktemp("held-out")
    for name in ("shapes.duckdb", "costs.duckdb"):
        shutil.copy(folder / name, own / name)
    with duckdb.connect(str(own / "shapes.duckdb")) as connection:
        connection.execute("UPDATE samples SET evaluation = true WHERE row % 4 = 1")
    return own, config | {"data": config["data"] | {"evaluation_share": 0.25}}


@pytest.fixture(scope="module")
def evaluated(held_out, tmp_path_factory):
    """A run of four steps that is evaluated behind every other one."""
    folder, config = held_out
    out = tmp_path_factory.mktemp("evaluated") / "train"
    return out, train(folder, config, plan_file(folder), out, steps=4, evaluate_every=2, loader_workers=1)


def test_the_evaluation_is_the_loss_of_the_plain_model_on_the_held_out_samples(held_out, evaluated):
    folder, config = held_out
    out, steps = evaluated
    assert [step["evaluation_loss"] is not None for step in steps] == [False, True, False, True]
    loaded = load_config(config)
    trained = LlavaOnevisionForConditionalGeneration.from_pretrained(out / "model", dtype=torch.float64)
    model = build_whole_model(loaded)
    model.load_state_dict(trained.state_dict())
    samples, _ = load_samples(folder / "shapes.duckdb", load_model_spec(loaded.model).encoders, evaluation=True)
    assert len(samples) > 8  # more than a batch
    assert steps[-1]["evaluation_loss"] == pytest.approx(loss_of_batch(model, loaded, samples), rel=1e-10)


def test_training_goes_on_as_if_it_had_not_been_evaluated_and_its_samples_are_others(held_out, evaluated, tmp_path):
    folder, config = held_out
    _, steps = evaluated
    others = train(folder, config, plan_file(folder), tmp_path / "train", steps=4)
    assert [step["evaluation_loss"] for step in others] == [None, None, None, steps[-1]["evaluation_loss"]]
    assert [(step["loss"], step["grad_norm"]) for step in others] == [
        (step["loss"], step["grad_norm"]) for step in steps
    ]


def test_another_layout_evaluates_alike(held_out, evaluated, tmp_path):
    folder, config = held_out
    _, steps = evaluated
    plan = plan_file(folder, placement="colocated", llm_pp=2, num_microbatches=4)
    others = train(folder, config, plan, tmp_path / "train", steps=2)
    assert others[1]["evaluation_loss"] == pytest.approx(steps[1]["evaluation_loss"], rel=1e-10)
