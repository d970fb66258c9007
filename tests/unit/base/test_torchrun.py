"""What starts the ranks says in a line how they ended."""

import signal
import sys

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException

from dflop.base import torchrun
from dflop.config import ClusterConfig


def test_ranks_that_a_signal_stops_are_one_line_and_no_stack(monkeypatch, capsys):
    def stopped(_):
        raise SignalException("Process 1 got signal: 15", signal.SIGTERM)

    monkeypatch.setattr(torch.distributed.run, "run", stopped)
    monkeypatch.setattr(sys, "argv", ["torchrun", "--standalone", "--module", "anything"])
    assert torchrun._main() == 1
    assert capsys.readouterr().err.endswith(" were stopped by SIGTERM\n")


CRASHING = """
import ctypes

def crash():
    ctypes.string_at(0)

crash()
"""


def test_a_rank_that_dies_in_compiled_code_says_where_it_was(tmp_path, monkeypatch, capfd):
    (tmp_path / "crashing.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, _ = torchrun.run_ranks("crashing", {}, ClusterConfig(device="cpu"), num_nodes=1, per_node=1)
    said = capfd.readouterr().err
    assert code != 0
    assert "Fatal Python error: Segmentation fault" in said
    assert 'crashing.py", line 5 in crash' in said
