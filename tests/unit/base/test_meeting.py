"""How the machines of a job find each other, and what that opens to others."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dflop.base import UserError
from dflop.base.first_node import last_words_told
from dflop.base.meeting import in_a_folder, over_machines
from dflop.train import sole_use


def _named(arguments: list[str]) -> dict[str, str]:
    """What the arguments say: those of torchrun, and the entries of `--rdzv-conf`."""
    found = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    return found | dict(entry.split("=") for entry in found.pop("rdzv-conf").split(","))


def test_on_one_machine_all_meet_in_a_folder_for_their_user_alone_which_is_deleted_in_the_end():
    with in_a_folder(2) as (nodes, inherited):
        first, second = map(_named, nodes)
        folder = first["rdzv-endpoint"]
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert second == first | {"rank": "1"}
        assert inherited == []
    assert not os.path.exists(folder)


@pytest.fixture
def step(monkeypatch, tmp_path):
    """`step(rank, job)`: this is a node of a Slurm step; a stub stands for `scontrol`."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/sh\nprintf 'n1\\n127.0.0.1\\n'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent), prepend=os.pathsep)
    monkeypatch.delenv("DFLOP_RENDEZVOUS_PORT", raising=False)

    def of(rank: int, job: str = "7", restarts: str = "0") -> None:
        values = {"JOB_ID": job, "RESTART_COUNT": restarts, "STEP_NODELIST": "n[1-2]", "PROCID": str(rank)}
        values["STEP_NUM_NODES"] = "2"
        for name, value in values.items():
            monkeypatch.setenv(f"SLURM_{name}", value)

    return of


@contextmanager
def other_node(shared: Path, taken_back_s: float = 600) -> Iterator[subprocess.Popen]:
    """The second node of the step, as a process that prints its arguments for torchrun."""
    code = "import sys, pathlib; from dflop.base import first_node; from dflop.base.meeting import over_machines\n"
    code += f"first_node._TAKEN_BACK_S = {taken_back_s}\n"
    code += "with over_machines(2, pathlib.Path(sys.argv[1])) as ([arguments], []): print(*arguments)"
    node = subprocess.Popen(
        [sys.executable, "-c", code, str(shared)],
        env=os.environ | {"SLURM_PROCID": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield node
    finally:
        node.kill()
        node.communicate()


def _wait_for_question(shared: Path, other: subprocess.Popen) -> None:
    while not (shared / ".meeting-7.0.0.1").exists():
        assert other.poll() is None, other.communicate()
        time.sleep(0.01)


def _fail_after(function: Callable, *arguments: object) -> None:
    function(*arguments)
    raise KeyError


def test_the_first_node_listens_where_it_reaches_the_second_and_tells_the_others_in_a_file(step, tmp_path):
    step(0)
    with other_node(tmp_path / "run") as other, over_machines(2, tmp_path / "run") as ([arguments], [inherited]):
        first = _named(arguments)
        assert int(first["listener"]) == inherited
        with socket.socket(fileno=os.dup(inherited)) as listener:
            assert listener.getsockname() == ("127.0.0.1", int(first["port"]))
        told = tmp_path / "run/.meeting-7.0.0"
        assert stat.S_IMODE(told.stat().st_mode) == 0o600
        of_other = _named(other.communicate()[0].split())
        del first["listener"]
        assert of_other == first | {"rank": "1"}
    assert not list((tmp_path / "run").iterdir())


def test_what_earlier_commands_left_is_not_read_be_they_of_another_job_or_of_this_very_step(step, tmp_path):
    step(0, job="8")
    for left in (".meeting-7.0.0", ".meeting-8.0.1", ".meeting-8.0.0"):
        (tmp_path / left).write_text(json.dumps({"to": ["5"], "address": "192.0.2.1", "port": 1}))
    (tmp_path / ".meeting-8.0.0.1").write_text("5")
    with other_node(tmp_path) as other, over_machines(2, tmp_path) as ([first], _):
        assert _named(other.communicate()[0].split())["port"] == _named(first)["port"] != "1"


def test_a_node_that_begins_the_next_command_of_its_step_earlier_waits_for_the_first_one(step, tmp_path):
    step(0)
    with ExitStack() as others:
        earlier = others.enter_context(other_node(tmp_path))
        with over_machines(2, tmp_path):
            earlier.communicate()
            other = others.enter_context(other_node(tmp_path))
            _wait_for_question(tmp_path, other)
        with over_machines(2, tmp_path) as ([first], _):
            assert _named(other.communicate()[0].split())["port"] == _named(first)["port"]


def test_the_other_nodes_are_refused_with_the_first_one(step, tmp_path):
    step(0)
    with sole_use(tmp_path), other_node(tmp_path) as other:
        _wait_for_question(tmp_path, other)
        with pytest.raises(UserError, match="trains here") as refused, last_words_told(tmp_path), sole_use(tmp_path):
            pass
        assert f"UserError: the first node has ended: {refused.value}\n" in other.communicate()[1]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "plan.yaml"), "No such file or directory: 'plan.yaml'"),
        (KeyError("rate"), "KeyError: 'rate'"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
)
def test_whatever_ends_the_first_node_before_the_others_are_told_is_said_to_all_of_them(step, tmp_path, error, said):
    """To one that asks already and, after a while, to one that begins later."""
    step(0)
    with other_node(tmp_path) as other:
        _wait_for_question(tmp_path, other)
        with pytest.raises(type(error)), last_words_told(tmp_path):
            raise error
        assert f"{said}\n" in other.communicate()[1]
    with other_node(tmp_path, taken_back_s=0) as late:
        assert f"{said}\n" in late.communicate()[1]


def test_last_words_of_an_earlier_command_are_taken_back_by_the_next_one_of_the_step(step, tmp_path):
    step(0)
    with pytest.raises(KeyError), last_words_told(tmp_path):
        raise KeyError
    with other_node(tmp_path) as other:
        _wait_for_question(tmp_path, other)
        with last_words_told(tmp_path), over_machines(2, tmp_path) as ([first], _):
            assert _named(other.communicate()[0].split())["port"] == _named(first)["port"]
    assert not list(tmp_path.glob(".meeting*"))


def test_what_ends_the_first_node_right_after_it_told_where_to_meet_is_said_to_who_had_not_read_that(step, tmp_path):
    step(0)
    with other_node(tmp_path) as other:
        _wait_for_question(tmp_path, other)
        with pytest.raises(KeyError), last_words_told(tmp_path), over_machines(2, tmp_path):
            _fail_after(other.send_signal, signal.SIGSTOP)
        other.send_signal(signal.SIGCONT)
        said, refused = other.communicate()
    assert "KeyError: " in refused or "--rdzv" in said


def test_what_ends_the_first_node_after_all_have_read_where_to_meet_is_left_nowhere(step, tmp_path):
    step(0)
    with other_node(tmp_path) as other, pytest.raises(KeyError), last_words_told(tmp_path), over_machines(2, tmp_path):
        _fail_after(other.wait)
    assert not list(tmp_path.glob(".meeting*"))


def test_commands_of_two_nodes_say_why_the_first_one_ended(step, tmp_path):
    step(0)
    command = [sys.executable, "-c", "import dflop.cli; dflop.cli.main()", "profile-links"]
    command += ["--out", str(tmp_path / "links.parquet"), "--config", "{cluster: {device: cpu, num_nodes: 2}}"]
    options = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"SLURM_PROCID": "1"}, **options) as other:
        _wait_for_question(tmp_path, other)
        first = subprocess.run(command, env=os.environ | {"DFLOP_RENDEZVOUS_PORT": "80"}, **options)
        said = "DFLOP_RENDEZVOUS_PORT is '80'; it must be a port's number from 1024 to 65535, or not be set\n"
        assert (first.returncode, first.stderr) == (2, f"dflop: {said}")
        assert other.stderr.read() == f"dflop: the first node has ended: {said}"
        assert other.wait() == 2


def test_a_node_whose_first_one_listens_no_more_ends(tmp_path):
    """As when the first node's torchrun cannot start after the others have learned the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "dflop.base.torchrun", "--nnodes=2", "--rdzv-backend=dflop"]
    command += ["--rdzv-endpoint=127.0.0.1", f"--rdzv-conf=rank=1,port={port}", "--module", "this"]
    node = subprocess.run(command, capture_output=True, text=True)
    assert node.returncode == 1
    assert re.search(
        r"^dflop: \S+ does not reach .* at 127\.0\.0\.1, .*: the first node has ended; see what", node.stderr, re.M
    )


def test_a_port_that_the_environment_names_is_taken_and_one_that_is_none_or_taken_is_refused(
    step, tmp_path, monkeypatch
):
    step(0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("DFLOP_RENDEZVOUS_PORT", port := str(taken.getsockname()[1]))
        said = rf"127\.0\.0\.1 port {port}: .*; name another one in DFLOP_R"
        with pytest.raises(UserError, match=f"^{said}"), over_machines(2, tmp_path):
            pass
    with other_node(tmp_path), over_machines(2, tmp_path) as ([arguments], _):
        assert _named(arguments)["port"] == port
    for wrong in ("80", "70000", "free", ""):
        monkeypatch.setenv("DFLOP_RENDEZVOUS_PORT", wrong)
        with (
            pytest.raises(UserError, match=f"^DFLOP_RENDEZVOUS_PORT is '{wrong}'; it must be a port's number"),
            over_machines(2, tmp_path),
        ):
            pass


def test_a_scontrol_that_fails_is_one_line(step, tmp_path):
    step(0)
    (tmp_path / "bin/scontrol").write_text("#!/bin/sh\necho slurm_load_node error >&2; exit 1\n")
    with (
        pytest.raises(UserError, match=r"^`scontrol show hostnames n\[1-2\]` failed: slurm_load_node error; ask"),
        over_machines(2, tmp_path),
    ):
        pass


def test_a_job_of_fewer_nodes_than_the_config_has_is_refused(step, tmp_path):
    step(0)
    with pytest.raises(UserError, match=r"num_nodes` is 3, this Slurm job has 2 node"), over_machines(3, tmp_path):
        pass


def test_a_node_that_hears_nothing_of_the_others_says_where_it_looked(step, tmp_path, monkeypatch):
    monkeypatch.setattr("dflop.base.first_node._LONGEST_WAIT_S", 0)
    step(1)
    with pytest.raises(UserError, match=r"\.meeting-7\.0\.0 .* all nodes see this folder"), over_machines(2, tmp_path):
        pass
    step(0)
    with (
        pytest.raises(UserError, match=r"1 of 2 nodes have not asked .* all nodes see"),
        over_machines(2, tmp_path),
    ):
        pass
