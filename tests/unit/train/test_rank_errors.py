"""What ends a rank's training is told in one line, with the way out."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from dflop.base import UserError
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
def test_a_gpu_that_is_full_is_named_with_what_to_lower(expected, error, monkeypatch, tmp_path):
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
    monkeypatch.setenv("RANK", "3")
    in_one_line = r"^rank 3 on [^\n]* 72 GiB: with a smaller `cluster.memory_gib`[^\n]*$"
    with pytest.raises(UserError, match=in_one_line) as raised:
        rank.main(request)
    assert expected in str(raised.value)


def test_a_loader_imports_no_model_and_collects_no_garbage_while_it_imports():
    """A loader process imports the rank's program under another name, and what it is made of."""
    program = """
import gc, runpy, sys
runpy.run_module("dflop.base.rank", run_name="__mp_main__")
assert not gc.isenabled()
from dflop.train.loader_process import begin
assert "transformers" not in sys.modules
begin(0, 0)
assert gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)
