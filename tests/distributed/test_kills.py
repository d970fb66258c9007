"""Runs of which one process is killed at any moment: the job ends, and the same command goes on bit by bit."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from training_runs import end_run, plan_file, start_run, train, wait_for_steps

from dflop.runtime.signals import children_of

pytestmark = pytest.mark.serial

_ALIKE = {"schedule": {"policy": "lpt", "deterministic": True}}
_TRAINING = {"steps": 12, "checkpoint_every": 1, "precision": "fp32"}
_LONGEST_END_S = 60
COMMAND, TORCHRUN = "dflop.cli", "dflop.runtime.torchrun"
RANK, SERVICE = "dflop.training.rank RANK=", "dflop.scheduling"
LAYOUTS = {
    "disjoint": {"num_microbatches": 4},
    "colocated": {"placement": "colocated", "llm_dp": 2, "num_microbatches": 2},
}


def losses_of(steps: list[dict]) -> list[tuple]:
    return [(step["step"], step["loss"], step["grad_norm"]) for step in steps]


def all_of(pid: int) -> list[int]:
    """A process and all that it and they have started."""
    return [pid, *(other for child in children_of(pid) for other in all_of(child))]


def what_is(pid: int) -> str:
    """Which kind of a run's processes this is."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    named = [part.decode() for part in command if part.startswith(b"dflop.") or b"cbc_process" in part]
    rank = [part for part in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if part.startswith(b"RANK=")]
    return " ".join([*named[:1], *(part.decode() for part in rank)]) or "a loader or its tracker"


def kill_one(folder: Path, config: dict, plan: Path, out: Path, draw: random.Random, kind: str) -> str:
    """Start a run and kill one of its processes of a kind at a drawn moment; returns what that was. All of the run must
    have ended within a minute, with an error where a rank was killed, which must be named."""
    process = start_run(folder, config | _ALIKE, plan, out, **_TRAINING, loader_workers=1)
    wait_for_steps(process, out, draw.randint(1, 6))
    time.sleep(draw.random())
    processes = {pid: what_is(pid) for pid in all_of(process.pid)}
    victim = draw.choice([pid for pid, what in processes.items() if kind in what])
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    code = end_run(process, out)
    assert time.monotonic() - killed_s < _LONGEST_END_S
    if "RANK=" in processes[victim] and "dflop.training.rank" in processes[victim]:
        assert code != 0
        rank = processes[victim].rpartition("=")[2]
        assert f"rank {rank} of " in (out / "log").read_text(), (out / "log").read_text()
    deadline = time.monotonic() + _LONGEST_END_S
    while left := [pid for pid, what in processes.items() if Path(f"/proc/{pid}").exists() and not is_gone(pid)]:
        assert time.monotonic() < deadline, [processes[pid] for pid in left]
        time.sleep(0.1)
    return processes[victim]


def is_gone(pid: int) -> bool:
    """Whether it has ended, and nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("layout", "kind"), [("disjoint", COMMAND), ("colocated", RANK)])
def test_a_run_of_which_a_process_is_killed_goes_on_as_if_it_had_not(run, tmp_path, layout, kind):
    folder, config = run
    plan = plan_file(folder, **LAYOUTS[layout])
    whole = train(folder, config | _ALIKE, plan, tmp_path / "whole", **_TRAINING)
    draw = random.Random(layout)
    kill_one(folder, config, plan, tmp_path / "train", draw, kind)
    resumed = train(folder, config | _ALIKE, plan, tmp_path / "train", **_TRAINING)
    assert losses_of(resumed) == losses_of(whole)
