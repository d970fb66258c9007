"""What ends a rank's training is told in one line, with the way out."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from dflop.train import rank

_OF_NCCL = "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error\nLast error:\n"
FULL = [
    (
        "CUDA out of memory. Tried to allocate 2.00 GiB. The plan was made",
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of ..."),
    ),
    *(
        ("NCCL's buffers do not fit: out of memory. The plan was made", dist.DistBackendError(_OF_NCCL + last))
        for last in ("Cuda failure 2 'out of memory'", "Failed to CUDA calloc async 1920 bytes")
    ),
]


@pytest.mark.parametrize(("expected", "error"), FULL)
def test_a_gpu_that_is_full_is_named_with_what_to_lower(expected, error, monkeypatch, capsys, tmp_path):
    def train(*_):
        raise error

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
    assert expected in said
    assert "72 GiB: with a smaller `cluster.memory_gib`" in said


@pytest.mark.parametrize(
    ("raised", "code"),
    [pytest.param("UserError('no')", 2, marks=pytest.mark.exhaustive), ("RuntimeError('a message')", 1)],
)
def test_a_loader_imports_no_model_and_a_rank_that_fails_waits_for_nobody(raised, code, tmp_path):
    """A loader process imports the rank's program under another name. A thread stands for communicators that torch
    would wait for."""
    program = f"""
import runpy, sys, threading, time
import dflop.train.loader_process
runpy.run_module("dflop.train.rank", run_name="__mp_main__")
assert "transformers" not in sys.modules
from dflop.base import UserError
from dflop.train import generation, trainer
def train(*_):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise {raised}
trainer.Trainer = train
generation.Generation = lambda **_: None
runpy.run_module("dflop.train.rank", run_name="__main__")
"""
    files = dict.fromkeys(("shapes", "costs", "plan", "out"), str(tmp_path))
    config = {"model": {"family": "llava_onevision", "preset": "tiny"}, "train": {"loader_workers": 1}}
    request = files | {"config": config, "generation": {"inputs": {}, "prices": ""}, "measured_on": None}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(request)],
        env=os.environ | {"RANK": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code
    last = done.stderr.splitlines()[-1]
    assert last == ("dflop: no" if code == 2 else "RuntimeError: a message")
