"""What starts the ranks says in a line how they ended."""

import signal
import sys

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException

from dflop.base import torchrun


def test_ranks_that_a_signal_stops_are_one_line_and_no_stack(monkeypatch, capsys):
    def stopped(_):
        raise SignalException("Process 1 got signal: 15", signal.SIGTERM)

    monkeypatch.setattr(torch.distributed.run, "run", stopped)
    monkeypatch.setattr(sys, "argv", ["torchrun", "--standalone", "--module", "anything"])
    assert torchrun._main() == 1
    assert capsys.readouterr().err.endswith(" were stopped by SIGTERM\n")
