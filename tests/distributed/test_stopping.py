"""Runs that end before their last step: asked to stop by signals to whichever process, or with a process killed at any
moment. The job ends, nothing of it is left, and the same command goes on bit by bit."""

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from subprocess import Popen

import pytest
from training_runs import end_run, plan_file, start_run, train, wait_for_steps

from dflop.base.signals import STOP_SIGNALS, children_of
from dflop.train.checkpoint_files import checkpoints_in, damage_in, read_run

pytestmark = pytest.mark.serial

_ALIKE = {"schedule": {"policy": "lpt", "deterministic": True}}
_NUM_STEPS = 28
_TRAINING = {"steps": _NUM_STEPS, "checkpoint_every": 1000, "precision": "fp32"}
_LONGEST_END_S = 60
COMMAND, AGENT, RANK = "dflop.cli", "dflop.base.torchrun", "dflop.base.rank RANK="


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> list[tuple]:
    """Step, loss and gradient norm of every step of a run that nobody stops."""
    folder, config = run
    return _losses_of(train(folder, config | _ALIKE, plan_file(folder), tmp_path_factory.mktemp("whole"), **_TRAINING))


def _losses_of(steps: list[dict]) -> list[tuple]:
    return [(step["step"], step["loss"], step["grad_norm"]) for step in steps]


def _all_of(pid: int) -> list[int]:
    """A process and all that it and they have started."""
    return [pid, *(other for child in children_of(pid) for other in _all_of(child))]


def _to_the_command(process: Popen, out: Path) -> None:
    process.terminate()


def _ahead_of_a_time_limit(process: Popen, out: Path) -> None:
    """As Slurm does where a job asks for it; the job is to be continued, and the exit code says so."""
    process.send_signal(signal.SIGUSR1)


def _to_the_agent(process: Popen, out: Path) -> None:
    (agent,) = (other for other in _all_of(process.pid) if _what_is(other).startswith(AGENT))
    os.kill(agent, signal.SIGTERM)


def _to_all_processes(process: Popen, out: Path) -> None:
    """As Slurm does at a time limit; after SIGTERMs to loaders, their trackers and the schedule service alone, of which
    training takes no notice."""
    processes = {other: _what_is(other) for other in _all_of(process.pid)}
    helpers = [other for other, what in processes.items() if what.startswith("RANK=") or "service" in what]
    assert len(helpers) == 5, processes
    for other in helpers:
        os.kill(other, signal.SIGTERM)
    wait_for_steps(process, out, (out / "metrics.jsonl").read_bytes().count(b"\n") + 2)
    assert not any(map(_is_gone, helpers))
    for other in _all_of(process.pid):
        os.kill(other, signal.SIGTERM)


def _stop(folder: Path, config: dict, out: Path, ask: Callable[[Popen, Path], None], loader_workers: int = 0) -> int:
    """Start a run and ask it to stop; returns behind which step it did."""
    process = start_run(folder, config | _ALIKE, plan_file(folder), out, **_TRAINING, loader_workers=loader_workers)
    wait_for_steps(process, out, 3)
    processes = _all_of(process.pid)
    ask(process, out)
    assert end_run(process, out) == (75 if ask is _ahead_of_a_time_limit else 2)
    _wait_for_the_end_of(processes)
    return _said_to_have_stopped_behind(out)


def _said_to_have_stopped_behind(out: Path) -> int:
    log = (out / "log").read_text()
    said = re.search(
        rf"training stopped after step (\d+) of {_NUM_STEPS}, as asked; the same command goes on from (.*)", log
    )
    assert said, log
    assert 3 <= int(said[1]) < _NUM_STEPS
    assert Path(said[2]).name == f"step-{int(said[1]):06d}"
    assert "Traceback" not in log
    assert not (out / "summary.json").exists()
    return int(said[1])


@pytest.mark.parametrize(
    "ask",
    [
        # The command passes both signals on alike, by way of the agent.
        pytest.param(_to_the_command, marks=pytest.mark.exhaustive),
        _ahead_of_a_time_limit,
        pytest.param(_to_the_agent, marks=pytest.mark.exhaustive),
    ],
    ids=lambda ask: ask.__name__[1:],
)
def test_whoever_is_asked_to_stop_all_ranks_stop_behind_the_same_step_which_is_saved(run, tmp_path, ask):
    folder, config = run
    num_steps = _stop(folder, config, tmp_path / "train", ask)
    assert (tmp_path / "train/metrics.jsonl").read_text().count("\n") == num_steps


def _ask_rank_1(out: Path, rank: int) -> None:
    """Send this rank a SIGTERM behind the third step, if it is rank 1."""

    def ask() -> None:
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as in ranks that torchrun starts
    if rank == 1:
        threading.Thread(target=ask, daemon=True).start()


def test_all_ranks_stop_behind_the_same_step_where_one_alone_is_asked(run, tmp_path):
    folder, config = run
    out = tmp_path / "train"
    before = partial(_ask_rank_1, out)
    steps = train(folder, config | _ALIKE, plan_file(folder), out, fails=True, before=before, **_TRAINING)
    assert _said_to_have_stopped_behind(out) == len(steps)


def _what_is(pid: int) -> str:
    """Which kind of a run's processes this is; of a loader and its tracker only the rank is said."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    named = [part.decode() for part in command if part.startswith(b"dflop.") or b"cbc_process" in part]
    rank = [part for part in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if part.startswith(b"RANK=")]
    return " ".join([*named[:1], *(part.decode() for part in rank)])


def _is_gone(pid: int) -> bool:
    """Whether it has ended, and nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _wait_for_the_end_of(processes: Iterable[int]) -> None:
    deadline = time.monotonic() + _LONGEST_END_S
    while left := [pid for pid in processes if not _is_gone(pid)]:
        assert time.monotonic() < deadline, [_what_is(pid) for pid in left]
        time.sleep(0.1)


def _kill_one(folder: Path, config: dict, out: Path, draw: random.Random, kind: str, **training: object) -> None:
    """Start a run, or go on with it, and kill one of its processes of a kind at a drawn moment. All of the run must
    have ended within a minute, with an error where a rank was killed, which must be named."""
    metrics = out / "metrics.jsonl"
    num_before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    process = start_run(folder, config | _ALIKE, plan_file(folder), out, **training, loader_workers=1)
    wait_for_steps(process, out, num_before + draw.randint(1, 4))
    time.sleep(draw.random() / 2)
    processes = {pid: _what_is(pid) for pid in _all_of(process.pid)}
    victim = draw.choice([pid for pid, what in processes.items() if kind in what])
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    code = end_run(process, out)
    assert time.monotonic() - killed_s < _LONGEST_END_S
    if kind == RANK:
        assert code != 0
        rank = processes[victim].rpartition("=")[2]
        assert f"rank {rank} of " in (out / "log").read_text(), (out / "log").read_text()
    _wait_for_the_end_of(processes)


def test_a_run_that_is_stopped_and_of_which_a_rank_and_the_command_are_killed_goes_on_as_if_not(run, whole, tmp_path):
    folder, config = run
    _stop(folder, config, tmp_path / "train", _to_all_processes, loader_workers=1)
    training, draw = _TRAINING | {"checkpoint_every": 1}, random.Random(0)
    for kind in (RANK, COMMAND):
        _kill_one(folder, config, tmp_path / "train", draw, kind, **training)
    num_restarts = _num_restarts(tmp_path / "train/checkpoints")
    resumed = train(folder, config | _ALIKE, plan_file(folder), tmp_path / "train", **training)
    assert _losses_of(resumed) == whole
    assert json.loads((tmp_path / "train/summary.json").read_text())["restarts"] == num_restarts + 1


def _num_restarts(checkpoints: Path) -> int:
    """What the latest whole checkpoint says: a run that was killed ahead of its first one left nothing that counts."""
    return next(read_run(path)["restarts"] for path in reversed(checkpoints_in(checkpoints)) if damage_in(path) is None)
