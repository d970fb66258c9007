"""Steps as TensorBoard shows them, and trackers that fail, which stop nothing."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from dflop.base import UserError
from dflop.train.trackers import Trackers, check_trackers


def line(step: int, loss: float, **more: float) -> dict:
    always = {"num_tokens": 100, "step_s": 0.5, "lr": 1e-3, "seconds": {"mean_rank": {"computing_s": 0.25}}}
    return {"step": step, "loss": loss, "evaluation_loss": None} | always | more


def scalars_in(folder) -> dict[str, list[tuple[int, float]]]:
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder))
    found.Reload()
    return {name: [(entry.step, entry.value) for entry in found.Scalars(name)] for name in found.Tags()["scalars"]}


@pytest.fixture
def no_wandb(monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_wandb")
def test_every_step_is_an_event_and_repeated_steps_replace_what_was_told_of_them(tmp_path):
    first = Trackers(tmp_path, 0, "auto")
    for step, loss in enumerate((4.0, 3.0, 2.5)):
        first.add(line(step, loss))
    first.close()
    again = Trackers(tmp_path, 2, "on")
    again.add(line(2, 2.0, evaluation_loss=3.5))
    again.close()
    told = scalars_in(tmp_path / "tensorboard")
    assert told["loss/train"] == [(0, 4.0), (1, 3.0), (2, 2.0)]
    assert told["loss/evaluation"] == [(2, 3.5)]
    assert told["time/tokens_per_s"][0] == (0, 200.0)
    assert told["seconds/computing_s"][0] == (0, 0.25)


@pytest.mark.usefixtures("no_wandb")
def test_nothing_is_written_where_it_is_off(tmp_path):
    trackers = Trackers(tmp_path, 0, "off")
    trackers.add(line(0, 1.0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_wandb")
def test_a_tracker_that_cannot_write_is_said_and_told_nothing_more(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file where the folder ought to be")
    trackers = Trackers(tmp_path, 0, "auto")
    trackers.add(line(0, 1.0))
    assert capsys.readouterr().err.count("warning: TensorBoard failed and is not used any more: ") == 1


def test_a_resumed_run_goes_on_under_its_id_with_weights_and_biases_and_a_new_run_does_not(tmp_path, monkeypatch):
    made, new = [], iter("ab")

    def init(**how: object) -> SimpleNamespace:
        made.append(how | {"id": how["id"] or next(new)})
        return SimpleNamespace(id=made[-1]["id"], log=lambda told, step: None, finish=lambda: None)

    wandb = ModuleType("wandb")
    wandb.init = init
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for first_step in (0, 5, 0):
        trackers = Trackers(tmp_path / "mine" / "train", first_step, "off")
        trackers.add(line(first_step, 1.0))
        trackers.close()
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    Trackers(tmp_path / "mine" / "train", 5, "off").close()
    assert [(own["id"], own["name"], own["resume"]) for own in made] == [
        (expected, "mine", "allow") for expected in ("a", "a", "b", "chosen")
    ]


def test_events_that_nobody_can_write_are_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    check_trackers("auto")
    with pytest.raises(UserError, match="`pip install tensorboard`, or set it to auto or off"):
        check_trackers("on")
