"""`dflop evaluate` calls lmms-eval on a run's model; here a stand-in that notes what it is called with."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from dflop.cli import cli

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def evaluate(*arguments: str, family: str = "qwen2_5_vl", is_trained: bool = True) -> Result:
    model = Path("results/mine/train/model")
    model.mkdir(parents=True)
    (model.parents[1] / "config.yaml").write_text(yaml.safe_dump({"run": "mine", "model": {"family": family}}))
    if is_trained:
        (model / "config.json").write_text("{}")
    return CliRunner().invoke(cli, ["evaluate", "mine", "--tasks", "mine", *arguments])


@pytest.fixture
def lmms_eval(monkeypatch) -> Path:
    """A module of this name that writes its arguments to the file that is returned."""
    place, calls = Path("modules").absolute(), Path("calls.json")
    place.mkdir()
    (place / "lmms_eval.py").write_text(
        "import json, sys\njson.dump(sys.argv[1:], open('calls.json', 'w'))\nsys.exit('--fail' in sys.argv)\n"
    )
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
    return calls


def test_lmms_eval_gets_the_model_the_tasks_and_what_else_is_given(lmms_eval):
    assert evaluate("--include_path", "tasks", "--limit", "3").exit_code == 0
    called = json.loads(lmms_eval.read_text())
    given = dict(zip(called[::2], called[1::2], strict=True))
    assert given == {
        "--model": "qwen2_5_vl",
        "--model_args": "pretrained=results/mine/train/model",
        "--tasks": "mine",
        "--batch_size": "1",
        "--output_path": "results/mine/evaluation",
        "--include_path": "tasks",
        "--limit": "3",
    }


def test_its_failure_is_ours(lmms_eval):
    assert "lmms-eval ended with exit code 1" in str(evaluate("--fail").exception)


def test_without_it_the_way_to_it_and_the_command_are_said():
    said = str(evaluate().exception)
    assert said.startswith("lmms-eval is not installed here: pip install 'dflop[evaluate]'")
    assert (
        "python -m lmms_eval --model qwen2_5_vl --model_args pretrained=results/mine/train/model --tasks mine" in said
    )


def test_a_run_without_a_model_is_said(lmms_eval):
    assert "results/mine/train/model is not there: the run has trained no model yet" in str(
        evaluate(is_trained=False).exception
    )


def test_a_family_that_it_does_not_know_is_said(lmms_eval):
    assert "lmms-eval has no model for checkpoints of qwen2_5_omni_thinker" in str(
        evaluate(family="qwen2_5_omni_thinker").exception
    )
