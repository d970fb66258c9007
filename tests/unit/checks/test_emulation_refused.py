"""What is not emulated, and where: each refusal is one line that names the way out."""

import json

import pytest
import yaml
from click.testing import CliRunner

from dflop.base import UserError
from dflop.checks.emulation import emulate, emulation_text
from dflop.cli import cli
from dflop.config import load_config
from dflop.plan import Grid, Plan
from dflop.report.run import read_run
from dflop.train.run_folder import is_emulated


def write_plan(path, num_ranks):
    grids = (Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=num_ranks - 1, rank_offset=1))
    plan = Plan(placement="disjoint", grids=grids, num_microbatches=1)
    path.write_text(yaml.safe_dump({"plan": plan.to_dict()}))
    return path


def emulated_in(folder, plan, *, num_devices=4):
    config = load_config({"cluster": {"devices_per_node": num_devices}, "schedule": {"correction": "off"}})
    nothing = folder / "nothing.duckdb"
    emulate(config, shapes=nothing, costs=nothing, plan=plan, out=folder / "out", scale=1.0, meta={})


def test_a_plan_of_more_ranks_than_the_machine_can_carry_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    plan = write_plan(tmp_path / "plan.yaml", 17)
    with pytest.raises(UserError, match=r"17 ranks, and this machine's 2 cores emulate 16 at most; plan for a smaller"):
        emulated_in(tmp_path, plan, num_devices=17)


@pytest.mark.parametrize("left", ["checkpoints", "model", "metrics.jsonl"])
def test_a_folder_of_a_training_run_is_left_alone(tmp_path, left):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / left).write_text(json.dumps({"step": 0, "loss": 1.0}) + "\n")
    with pytest.raises(UserError, match=f"holds a training run .{left}.*give --out a folder of its own"):
        emulated_in(tmp_path, write_plan(tmp_path / "plan.yaml", 4))


def test_missing_costs_are_named_with_the_command_that_makes_them(tmp_path):
    with pytest.raises(UserError, match=r"nothing.duckdb.*fit-costs"):
        emulated_in(tmp_path, write_plan(tmp_path / "plan.yaml", 4))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--costs", "c.duckdb", "--emulate", "c.duckdb"], "leave out --costs"),
        ([], "needs --costs, or --emulate"),
        (["--costs", "c.duckdb", "--emulate-scale", "0.5"], "--emulate-scale goes with --emulate"),
    ],
)
def test_training_and_emulating_are_asked_for_one_at_a_time(options, said):
    files = ["--shapes", "s.duckdb", "--plan", "p.yaml", "--out", "nowhere"]
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(cli, ["train", *files, *options], catch_exceptions=False, standalone_mode=False)


def test_nobody_trains_in_or_reports_on_an_emulated_run(tmp_path):
    train = tmp_path / "train"
    train.mkdir()
    (train / "metrics.jsonl").write_text(json.dumps({"step": 0, "emulated": True}) + "\n")
    assert is_emulated(train)
    with pytest.raises(UserError, match=r"emulated run .*nothing was trained; move it"):
        read_run(tmp_path)
    files = ["--shapes", "s.duckdb", "--plan", "p.yaml", "--costs", "c.duckdb", "--out", str(train)]
    with pytest.raises(UserError, match="holds an emulated run; remove it"):
        CliRunner().invoke(cli, ["train", *files], catch_exceptions=False, standalone_mode=False)


def test_the_text_says_measured_beside_predicted_and_the_scale():
    spread = {"median": 1.03, "least": 1.01, "most": 1.2}
    seconds = {"step_s": 0.515, "predicted_step_s": 0.5, "wait_s": 0.001, "idle": 0.2, "predicted_idle": 0.18}
    summary = {"measured_over_predicted": spread, "pipeline_over_predicted": spread, "scale": 0.25, "num_ranks": 8}
    text = emulation_text(seconds | summary | {"costs": "analytic", "policy": "search", "num_compared": 50})
    assert "measured 0.515 s, predicted 0.500 s" in text
    assert "median 1.030, from 1.010 to 1.200" in text
    assert "all seconds times 0.25" in text
