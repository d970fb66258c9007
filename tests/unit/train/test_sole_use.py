"""Two trainings never write to one folder at a time."""

import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest

from dflop.base import UserError
from dflop.train import sole_use


def holder(**changes: object) -> str:
    return json.dumps({"host": socket.gethostname(), "pid": 1, "job": None, "since": "2026-01-02 03:04:05"} | changes)


@pytest.mark.parametrize(
    ("job", "about", "how"),
    [
        (None, r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", r"`kill \d+` there"),
        ("7", r"Slurm job 7, since .{19}", "`scancel 7`"),
    ],
    ids=["alone", "in a job"],
)
def test_a_second_training_is_refused_in_a_line_that_names_the_first(tmp_path, monkeypatch, job, about, how):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    who = rf"process {os.getpid()} of {socket.gethostname()} \({about}\)"
    refused = pytest.raises(UserError, match=rf"{who} trains here; wait for its end, or end it \({how}\)\. .*\.lock$")
    with sole_use(tmp_path), refused, sole_use(tmp_path):
        pass
    with sole_use(tmp_path):
        pass


def test_a_holder_that_was_killed_is_no_hindrance_and_none_on_this_machine_is_worth_a_word(tmp_path, capfd):
    killed = "import os, pathlib, sys; from dflop.train import sole_use\n"
    killed += "with sole_use(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] != os.getpid()
    with sole_use(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert capfd.readouterr().err == ""


def test_what_is_known_of_a_training_on_another_machine_that_left_no_word_is_said(tmp_path, capsys):
    (tmp_path / ".lock").write_text(holder(host="node9", pid=12, job="7"))
    with sole_use(tmp_path):
        pass
    assert "process 12 of node9 (Slurm job 7, since 2026-01-02 03:04:05) has left no word" in capsys.readouterr().err
    with sole_use(tmp_path):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("left", ["", "[]", "{", '{"pid": 3}', holder()], ids=["none", "list", "torn", "pid", "whole"])
def test_a_file_system_without_locks_is_said_with_what_stands_in_the_file(tmp_path, monkeypatch, capsys, left):
    def without(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without)
    (tmp_path / ".lock").write_text(left)
    with sole_use(tmp_path):
        pass
    said = capsys.readouterr().err
    assert ".lock: Function not implemented: nothing keeps a second training out of this folder" in said
    assert ("has left no word of its end" in said) == bool(left)
