"""The watch tells ranks that wait for others by the functions in which they do, and kills none but its neighbours."""

import _thread
import ast
import json
import math
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dflop
from dflop.train.peers import _GIVES, _READS, _WAITS, PeerWatch, _may_wait
from dflop.train.step_sums import sum_over_ranks


@pytest.mark.parametrize(("path", "name"), [waits for waits in _WAITS + _READS + _GIVES if waits[1]])
def test_a_function_in_which_ranks_wait_exists(path, name):
    (file,) = (file for file in Path(dflop.__file__).parent.rglob("*.py") if str(file).endswith(f"/{path}"))
    functions = [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    assert any(function.startswith(name) for function in functions)


@pytest.mark.parametrize("on_gpus", [True, False])
def test_a_host_that_reads_a_sum_from_its_gpu_waits_for_others(on_gpus, monkeypatch):
    watch, places = PeerWatch(dist.HashStore(), 0, "llm stage 0", 1, timeout_s=60.0, on_gpus=on_gpus), []

    def look(*_) -> None:
        other = threading.Thread(target=lambda: places.append(watch._place()))
        other.start()
        other.join()

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_reduce", look)  # NCCL's returns at once, and the read behind it waits
    sum_over_ranks({"loss": 1.0}, [2.0], torch.device("cpu"))
    assert places == ["waiting in sum_over_ranks" if on_gpus else "in sum_over_ranks of step_sums.py"]


def function_of(path: str, name: str, **known):
    """A function of this name that calls `inner`, as if it stood in this file."""
    exec(compile(f"def {name}(): inner()", path, "exec"), known)
    return known[name]


@pytest.mark.parametrize("starts", ["autograd", "python", "none"])
def test_a_main_thread_in_backward_waits_where_autograds_thread_does(starts):
    """A GPU's backward runs in a thread of torch's own. Another thread of Python's that waits is the saver's."""
    watch, places = PeerWatch(dist.HashStore(), 0, "llm stage 0", 1, timeout_s=60.0, on_gpus=True), []
    waits, ends = threading.Event(), threading.Event()
    wait = function_of("/torch/distributed/distributed_c10d.py", "all_reduce", inner=lambda: (waits.set(), ends.wait()))
    if starts != "none":
        _thread.start_new_thread(wait, ()) if starts == "autograd" else threading.Thread(target=wait).start()
        waits.wait(60)

    def look() -> None:
        other = threading.Thread(target=lambda: places.append(watch._place()))
        other.start()
        other.join()

    function_of("/dflop/train/node_work.py", "backward", inner=look)()
    ends.set()
    own = "in backward of node_work.py, or waiting for its GPU"
    assert places == ["waiting in all_reduce" if starts == "autograd" else own]
    inner = function_of("/dflop/models/stages.py", "encode", inner=look)
    function_of("/dflop/train/node_work.py", "forward", inner=inner)()
    assert places[1] == "in encode of stages.py, or waiting for its GPU"
    assert all(_may_wait({"at": place}) for place in places)
    assert not _may_wait({"at": "in forward of node_work.py"})


class EndedError(Exception): ...


@pytest.fixture
def raises_at_exit(monkeypatch):
    def end(_):
        raise EndedError

    monkeypatch.setattr(os, "_exit", end)


@pytest.mark.usefixtures("raises_at_exit")
def test_ranks_that_are_alive_but_wait_for_each_other_end_the_job_after_a_longer_time(capsys):
    watch = PeerWatch(dist.HashStore(), 0, "llm stage 0", 1, timeout_s=60.0)

    def judge(seconds: float) -> None:
        before = watch._signs()
        watch._give_sign()
        watch._judge("step 1", seconds, before, alive_s=600.0)

    judge(599.0)
    with pytest.raises(EndedError):
        judge(600.0)
    assert "step 1 has not ended for 600 s" in capsys.readouterr().err


@pytest.mark.usefixtures("raises_at_exit")
def test_no_process_is_killed_but_silent_ranks_that_the_same_torchrun_has_started():
    store = dist.HashStore()
    watch = PeerWatch(store, 0, "llm stage 0", 2, timeout_s=60.0)
    with subprocess.Popen(["sleep", "60"]) as other:  # a child of this process, as no rank is of another
        sign = json.loads(store.get("alive/0")) | {"pid": other.pid}
        store.set("alive/1", json.dumps(sign))
        with pytest.raises(EndedError):  # both ranks are silent
            watch._judge("step 1", 60.0, watch._signs(), alive_s=math.inf)
        assert other.poll() is None
        other.kill()
