"""What makes a run another run, what becomes of the old one's outputs, and what a summary is of."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import save_file

from dflop.base import UserError
from dflop.config import load_config
from dflop.store import STEP_SECONDS_SCHEMA
from dflop.train import check_resumable, finished_at, generation_of, summarise
from dflop.train.generation import Generation
from dflop.train.observations import Merged
from dflop.train.run_folder import MeasuredOn, set_aside, set_observed_aside
from dflop.train.step_log import say_if_costs_are_of_another

MADE = {"train": {"steps": 4}}


@pytest.fixture
def generate(make_run):
    """`generate(config)`: the generation of a run with this config on the same data, costs and plan."""
    from dflop.schedule.service import open_scheduler

    run = make_run()
    pricer = open_scheduler(load_config(run.config), **run.paths).pricer
    return lambda config=None, digests=("d",), left_out=(): generation_of(
        load_config(run.config, MADE, config or {}), digests, left_out, pricer
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train": {"lr": 0.5}}, "`train.lr` was 0.0001 and is 0.5"),
        ({"train": {"warmup_steps": 7}}, "`train.warmup_steps` was 0 and is 7"),
        ({"train": {"weight_decay": 0.5}}, "`train.weight_decay` was 0.01 and is 0.5"),
        ({"train": {"grad_clip": 0.5}}, "`train.grad_clip` was 1.0 and is 0.5"),
        ({"train": {"precision": "bf16"}}, '`train.precision` was "fp32" and is "bf16"'),
        ({"seed": 3}, "`seed` was 0 and is 3"),
        ({"model": {"freeze": ["vision"]}}, '`model.freeze` was [] and is ["vision"]'),
    ],
)
def test_what_changes_the_weights_makes_another_run_and_is_named(generate, config, said):
    assert generate(config).changes_since(generate()) == [said]


def test_other_data_make_another_run_and_other_samples_left_out_do_not_but_are_said(generate):
    assert generate(digests=("e",)).changes_since(generate()) == ["the data changed"]
    assert not generate(left_out=[("a", 1)]).changes_since(generate())
    assert "other samples are left out" in generate(left_out=[("a", 1)]).otherwise_left_out(generate())
    assert generate().otherwise_left_out(generate()) is None


def test_the_same_data_and_weights_at_another_place_are_the_same_run(generate, tmp_path):
    places, moved = [tmp_path / name for name in ("home", "scratch")], []
    for place in places:
        place.mkdir()
        save_file({"llm": np.zeros(3)}, place / "model.safetensors")
        (place / "config.json").write_text("{}")
        source = {"path": f"{place}/a.json", "media_root": str(place)}
        folders = dict.fromkeys(("path", "tokenizer", "weights", "adapter"), str(place))
        moved.append(generate({"data": {"sources": [source]}, "model": folders}))
    assert not moved[1].changes_since(moved[0])
    (places[1] / "config.json").write_text('{"eps": 1e-5}')
    other = generate({"data": {"sources": [source]}, "model": folders})
    assert other.changes_since(moved[0]) == ["the model's configs, tokenizer and templates changed"]
    without_digest = {name: value for name, value in moved[0].weights.items() if "tokenizer and templates" not in name}
    earlier_version = replace(moved[0], weights=without_digest)
    assert not moved[0].changes_since(earlier_version)
    assert [said.split("`")[1] for said in moved[1].changes_since(earlier_version)] == ["model.path", "model.tokenizer"]


def test_a_model_of_other_files_is_named_and_files_that_are_not_read_do_not_count(generate, tmp_path):
    save_file({"llm": np.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    model, tokenizer = generate({"model": {"path": str(tmp_path)}}), generate({"model": {"tokenizer": str(tmp_path)}})
    assert any("model.path" in said for said in tokenizer.changes_since(model))
    assert any("model.path" in said for said in model.changes_since(tokenizer))
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("{}")
    assert not generate({"model": {"path": str(tmp_path)}}).changes_since(model)


def test_more_steps_and_faster_loading_make_no_other_run(generate):
    more = {"train": {"steps": 9, "checkpoint_every": 3, "loader_workers": 0, "resume": "never"}}
    assert generate(more) == generate()
    assert generate({"schedule": {"policy": "lpt"}}).digest == generate().digest


def test_a_checkpoint_that_does_not_know_a_key_goes_on_while_the_key_says_nothing(generate, tmp_path):
    save_file({"llm": np.zeros(3)}, tmp_path / "model.safetensors")
    source = {"path": "a.json", "media_root": "."}
    now = generate({"data": {"sources": [source]}, "model": {"weights": str(tmp_path)}})
    before = dict(now.weights)
    assert not {"train.betas", "train.eps"} & before.keys()
    assert generate({"train": {"betas": [0.9, 0.95]}}).changes_since(generate()) == [
        "`train.betas` was [0.9, 0.999] and is [0.9, 0.95]"
    ]
    del before["the weights that training begins with"], before["model.lora"]
    assert not now.changes_since(Generation(before, ""))
    assert not {"columns", "epochs", "weight"} & json.loads(now.weights["data.sources"])[0].keys()
    others = generate({"data": {"sources": [source | {"epochs": 2}]}, "model": {"weights": str(tmp_path)}})
    assert others.changes_since(Generation(before, "")) == ["`data.sources` changed"]


def test_a_checkpoint_of_before_generations_is_of_another_version(generate):
    assert generate().changes_since(Generation.of_run({"step": 3})) == ["another version of dflop wrote the checkpoint"]


def write_run(out: Path, generation: Generation, prices: list[str]) -> None:
    """A run's folder with a step for each digest of prices, the last of them the checkpoint's."""
    checkpoint = out / f"checkpoints/step-{len(prices):06d}"
    checkpoint.mkdir(parents=True)
    trained = generation.to_dict() | {"prices": prices[-1]}
    (checkpoint / "run.json").write_text(json.dumps({"step": len(prices), "restarts": 0, "generation": trained}))
    (out / "model").mkdir()
    zeros = dict.fromkeys(("wait_s", "data_wait_s", "num_unreadable", "idle"), 0)
    lines = [
        {"step": step, "loss": 9.0 - step, "num_samples": 2, "num_tokens": 100, "step_s": 1.0 + (own != "old")}
        | {"pipeline_s": 1.0, "predicted_step_s": 1.0, "policy": "lpt", "policy_status": "lpt", "generation": own}
        | zeros
        for step, own in enumerate(prices)
    ]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_finished_when_its_last_step_and_its_model_are_there(generate, tmp_path):
    config, generation = load_config(MADE), generate()
    assert finished_at(config, tmp_path, generation) is None
    write_run(tmp_path, generation, ["p"] * 4)
    assert finished_at(config, tmp_path, generation) == tmp_path / "checkpoints/step-000004"
    assert finished_at(load_config(MADE, {"train": {"steps": 5}}), tmp_path, generation) is None
    assert finished_at(load_config(MADE, {"train": {"resume": "never"}}), tmp_path, generation) is None
    assert finished_at(config, tmp_path, generate({"train": {"lr": 0.5}})) is None
    (tmp_path / "model").rmdir()
    assert finished_at(config, tmp_path, generation) is None


def test_a_run_that_is_required_to_resume_is_not_begun_anew_and_no_step_is_taken_back(generate, tmp_path):
    config, other = load_config(MADE, {"train": {"resume": "require"}}), generate({"train": {"lr": 0.5}})
    given = {"steps_are_given": True}
    check_resumable(config, tmp_path, other, **given)  # there is nothing to resume
    damaged = tmp_path / "checkpoints/damaged-step-000002"
    damaged.mkdir(parents=True)
    with pytest.raises(UserError, match=r"none of the checkpoints in .* is whole; see `damaged-…` there"):
        check_resumable(config, tmp_path, other, **given)
    damaged.rmdir()
    damaged.parent.rmdir()
    write_run(tmp_path, generate(), ["p"] * 4)
    check_resumable(config, tmp_path, generate(), **given)
    with pytest.raises(UserError, match=r"`train.lr` was 0.0001 and is 0.5; change it back to go on, or set .* auto"):
        check_resumable(config, tmp_path, other, **given)
    check_resumable(load_config(MADE), tmp_path, other, **given)
    fewer = load_config({"train": {"steps": 3}})
    with pytest.raises(UserError, match=r"step-000004 is of step 4, and `train.steps` is 3: raise it to go on"):
        check_resumable(fewer, tmp_path, generate(), **given)
    check_resumable(fewer, tmp_path, generate(), steps_are_given=False)
    assert finished_at(fewer, tmp_path, generate())


def test_figures_of_two_cost_tables_are_not_mixed_and_losses_are_what_they_are_called(generate, tmp_path):
    generation = generate()
    write_run(tmp_path, generation, ["old"] * 6 + [generation.prices] * 4)
    columns = {"module": ["llm"], "pass": ["forward"], "seconds": [3.0], "predicted_s": [2.0], "warmup": [False]}
    merged = Merged(pl.DataFrame(columns), STEP_SECONDS_SCHEMA.to_frame())
    summary = summarise(load_config(MADE), tmp_path, merged, generation, baselines={}, num_left_out=0)
    assert summary["prices"] == generation.prices
    assert summary["step_s"] == 2.0  # of the last four alone
    assert summary["samples_per_s"] == 1.0
    assert (summary["num_steps"], summary["num_averaged_losses"]) == (10, 5)
    assert (summary["first_loss"], summary["final_loss"]) == (9.0, 0.0)
    assert (summary["mean_first_loss"], summary["mean_final_loss"]) == (7.0, 2.0)
    assert summary["measured_over_predicted"] == {"llm forward": 1.5}


@pytest.mark.parametrize(
    ("measured_on", "said"),
    [
        (None, []),  # analytic costs
        (MeasuredOn("a card", "flash-attn 3"), []),
        (MeasuredOn("a card", None), []),  # costs of a version that did not write it
        (
            MeasuredOn("a card", "torch varlen"),
            ["with the attention of 'torch varlen' and this run has 'flash-attn 3'"],
        ),
        (MeasuredOn("b card", "sdpa"), ["on 'b card' and this is 'a card'", "with the attention of 'sdpa'"]),
    ],
)
def test_costs_of_another_device_or_kernel_of_attention_are_said_in_a_line_each(measured_on, said, capsys):
    say_if_costs_are_of_another(measured_on, MeasuredOn("a card", "flash-attn 3"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


def test_the_last_two_earlier_runs_are_kept_and_it_is_said_what_is_removed(tmp_path):
    for number in range(1, 5):
        (tmp_path / "metrics.jsonl").write_text(str(number))
        (tmp_path / "mine.txt").write_text("of nobody's business")
        said = set_aside(tmp_path)
        assert f"moved to {tmp_path / f'old-{number}'}" in said
        assert ("was removed" in said) == (number > 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "old-3", "old-4"]
    assert (tmp_path / "old-4/metrics.jsonl").read_text() == "4"


def test_what_was_observed_with_other_costs_takes_no_place_of_a_run_that_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("a run")
    set_aside(tmp_path)
    for number in range(1, 4):
        (tmp_path / "trace.json").write_text(str(number))
        assert f"moved to {tmp_path / f'observed-{number}'}" in set_observed_aside(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["observed-2", "observed-3", "old-1"]
    assert (tmp_path / "old-1/metrics.jsonl").read_text() == "a run"


def test_a_run_that_is_set_aside_keeps_its_summary_though_the_workflow_deleted_it(tmp_path):
    (tmp_path / "last_summary.json").write_text("its summary")
    set_aside(tmp_path)
    assert (tmp_path / "old-1/summary.json").read_text() == "its summary"
