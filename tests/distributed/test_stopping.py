"""Runs that are asked to stop, by signals to whichever process: they save, and the same command goes on from there."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from training_runs import end_run, plan_file, process_of_rank, start_run, train, wait_for_steps

from dflop.runtime.signals import children_of

pytestmark = pytest.mark.serial

_ALIKE = {"schedule": {"policy": "lpt", "deterministic": True}}
_TRAINING = {"steps": 16, "checkpoint_every": 1000, "precision": "fp32"}


def _all_of(pid: int) -> list[int]:
    """A process and all that it and they have started."""
    return [pid, *(other for child in children_of(pid) for other in _all_of(child))]


def _to_the_command(pid: int, out: Path) -> None:
    os.kill(pid, signal.SIGTERM)


def _ahead_of_a_time_limit(pid: int, out: Path) -> None:
    """As Slurm does where a job asks for it; the job is to be continued, and the exit code says so."""
    os.kill(pid, signal.SIGUSR1)


def _to_a_rank(pid: int, out: Path) -> None:
    os.kill(process_of_rank(1, out), signal.SIGUSR1)


def _to_all_processes(pid: int, out: Path) -> None:
    """As Slurm does at a time limit."""
    for other in _all_of(pid):
        os.kill(other, signal.SIGTERM)


def _stop(folder: Path, config: dict, plan: Path, out: Path, ask: Callable[[int, Path], None]) -> int:
    """Start a run and ask it to stop; returns behind which step it did."""
    process = start_run(folder, config | _ALIKE, plan, out, **_TRAINING, loader_workers=1)
    wait_for_steps(process, out, 3)
    ask(process.pid, out)
    assert end_run(process, out) == (75 if ask is _ahead_of_a_time_limit else 2)
    log = (out / "log").read_text()
    said = re.search(r"training stopped after step (\d+) of 16, as asked; the same command goes on from (.*)", log)
    assert said, log
    assert 3 <= int(said[1]) < 16
    assert Path(said[2]).name == f"step-{int(said[1]):06d}"
    assert "Traceback" not in log
    assert not (out / "summary.json").exists()
    return int(said[1])


@pytest.mark.parametrize("ask", [_to_the_command, _ahead_of_a_time_limit, _to_a_rank], ids=lambda ask: ask.__name__[1:])
def test_whoever_is_asked_to_stop_all_ranks_stop_behind_the_same_step_which_is_saved(run, tmp_path, ask):
    folder, config = run
    num_steps = _stop(folder, config, plan_file(folder), tmp_path / "train", ask)
    assert (tmp_path / "train/metrics.jsonl").read_text().count("\n") == num_steps


def test_a_run_whose_processes_were_all_asked_to_stop_goes_on_as_if_it_had_not(run, tmp_path):
    folder, config = run
    plan = plan_file(folder)
    whole = train(folder, config | _ALIKE, plan, tmp_path / "whole", **_TRAINING)
    _stop(folder, config, plan, tmp_path / "train", _to_all_processes)
    resumed = train(folder, config | _ALIKE, plan, tmp_path / "train", **_TRAINING)
    assert [(step["step"], step["loss"], step["grad_norm"]) for step in resumed] == [
        (step["step"], step["loss"], step["grad_norm"]) for step in whole
    ]
