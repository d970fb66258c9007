"""What a rank says where it fails, and the exit code with which it ends."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dflop.base import UserError, rank

PROGRAM = """
import gc, threading, time
assert not gc.isenabled()  # while this is imported
def main(request):
    assert gc.isenabled()
    threading.Thread(target=time.sleep, args=(1000,)).start()  # as communicators for which torch would wait
    {does}
"""


@pytest.mark.parametrize(
    ("does", "code", "last"),
    [
        ("raise __import__('dflop.base').base.UserError(request['why'])", 2, "dflop: no such file"),
        ("raise RuntimeError(request['why'])", 1, "RuntimeError: no such file"),
    ],
)
def test_a_rank_that_fails_says_why_and_waits_for_nobody(does, code, last, tmp_path):
    (tmp_path / "fails.py").write_text(PROGRAM.format(does=does))
    done = subprocess.run(
        [sys.executable, "-m", "dflop.base.rank", "fails", json.dumps({"why": "no such file"})],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.rstrip().rpartition("\n")[2] == last


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_nodes_first_rank_says_why_it_ends_before_the_others_do(monkeypatch, capsys, local_rank):
    def fails(request: dict) -> None:
        raise UserError(f"no {request['device']}")

    said_before_waiting, codes = [], []
    monkeypatch.setitem(sys.modules, "failing", SimpleNamespace(main=fails))
    monkeypatch.setattr(sys, "argv", ["rank", "failing", '{"device": "GPU"}'])
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("dflop.base.rank.time.sleep", lambda _: said_before_waiting.append(capsys.readouterr()))
    monkeypatch.setattr(rank, "_end", codes.append)
    rank.main()
    assert codes == [2]
    assert capsys.readouterr().err == "dflop: no GPU\n"
    assert [said.err for said in said_before_waiting] == ([] if local_rank == "0" else [""])
