"""What starts the ranks says in a line how they ended."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.serial


def test_ranks_that_a_signal_stops_say_so_in_a_line_and_without_a_stack():
    torchrun = subprocess.Popen(
        [
            *(sys.executable, "-m", "dflop.torchrun", "--standalone", "--nproc-per-node=1", "--no-python"),
            *("sh", "-c", "echo started; exec sleep 100"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert torchrun.stdout.readline() == "started\n"
    torchrun.terminate()
    _, said = torchrun.communicate(timeout=60)
    assert torchrun.returncode == 1
    assert said.splitlines()[-1].startswith("dflop: the ranks of ")
    assert said.endswith(" were stopped by SIGTERM\n")
    assert "Traceback" not in said
