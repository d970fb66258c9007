"""What ends a rank's training is told in one line, with the way out."""

import json
import sys

import torch

from dflop.train import rank


def test_a_gpu_that_is_full_is_named_with_what_to_lower(monkeypatch, capsys, tmp_path):
    def train(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of ..."
        )

    files = dict.fromkeys(("shapes", "costs", "plan", "out"), str(tmp_path))
    config = {"cluster": {"memory_gib": 72}, "train": {"loader_workers": 1}}
    request = files | {"config": config, "generation": {"inputs": {}, "prices": ""}, "measured_on": None}
    monkeypatch.setattr(rank, "Trainer", train)
    monkeypatch.setattr(rank, "StopRequest", lambda: None)
    monkeypatch.setattr(rank, "Generation", lambda **_: None)
    monkeypatch.setattr(rank, "allow_open_files", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["rank", json.dumps(request)])
    monkeypatch.setenv("RANK", "3")
    assert rank.main() == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("dflop: rank 3 on ")
    assert "CUDA out of memory. Tried to allocate 2.00 GiB. The plan was made" in said
    assert "72 GiB: with a smaller `cluster.memory_gib`" in said
