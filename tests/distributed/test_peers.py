"""A rank that hangs ends the job soon, by name, wherever the others wait for it."""

import ctypes
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import print_to, run_command
from training_runs import plan_file

from dflop.base.folder_store import FolderStore
from dflop.train import peers, trainer
from dflop.train.peers import PeerWatch, longest_wait_s

pytestmark = pytest.mark.serial

_TIMEOUT_S = 3.0


def _train(rank: int, port: int, hangs: str, log: Path) -> None:
    """Three ranks that sum something in each step. The second one hangs in its fourth."""
    print_to(log)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(log.with_name("record_"))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=3)
    compiled = [0, 0]
    about = (rank, f"llm stage {rank} replica 0", 3, _TIMEOUT_S, lambda: tuple(compiled))
    # Ranks of one node have a store in a folder, those of several a TCPStore.
    one_node = FolderStore(log.parent / "store", timedelta(seconds=60))
    watch = PeerWatch(one_node if hangs == "stopped" else dist.PrefixStore("dflop", store), *about)
    if hangs == "stopped" and rank == 2:
        record = watch._record
        watch._record = lambda: (time.sleep(1), record())  # the disk is slow
    watch.start()
    dist.barrier()
    for step in range(100):
        watch.begin(f"step {step}", _TIMEOUT_S, alive_s=math.inf if hangs == "saving" else 0.0)
        if rank == 1 and step == 3:
            if hangs == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            compiled[0] += hangs == "compiling"
            if hangs == "loading":
                peers._LOADS = (("test_peers.py", _load.__name__),)
                _load()
                time.sleep(0.4 * _TIMEOUT_S)
            else:
                time.sleep(3 * _TIMEOUT_S if hangs in ("saving", "compiling") else 1000)
            compiled[1] += hangs == "compiling"
        dist.all_reduce(torch.ones(3))
        if step > 3:
            break
    watch.close()


def _load() -> None:
    """As without loader processes, where the rank itself is at a sample."""
    inner = {}
    exec(compile("def sleep(seconds): time.sleep(seconds)", "/dflop/loading/dataset.py", "exec"), {"time": time}, inner)
    inner["sleep"](3 * _TIMEOUT_S)


def _exit_codes(hangs: str, log: Path) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [context.Process(target=_train, args=(rank, store.port, hangs, log)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    try:
        # A rank that is busy ends last: torchrun would end it.
        for rank in [ranks[0], ranks[2], *([] if hangs == "busy" else [ranks[1]])]:
            rank.join()
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_a_stopped_rank_is_named_and_ended_and_the_others_write_what_they_recorded(tmp_path):
    assert _exit_codes("stopped", tmp_path / "log") == [1, -signal.SIGKILL, 1]
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "no sign of life" in line]
    assert len(said) == 1
    assert re.search(r"dflop: step 3 has not ended for \d+ s .*: rank 1 \(llm stage 1 replica 0, process \d+", said[0])
    assert "rank 0" not in said[0]
    records = {path.name: pickle.loads(path.read_bytes()) for path in tmp_path.glob("record_*")}
    assert set(records) == {"record_0", "record_2"}
    assert all("version" in record for record in records.values())


def test_a_rank_that_lives_but_waits_for_nobody_is_named(tmp_path):
    codes = _exit_codes("busy", tmp_path / "log")
    assert (codes[0], codes[2]) == (1, 1)
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "has not ended for" in line]
    assert len(said) == 1
    assert "these do not wait for another rank: rank 1 (llm stage 1 replica 0" in said[0]


def test_what_may_take_longer_does_as_long_as_all_give_signs_of_life(tmp_path):
    """Both side by side: their ranks wait nearly all of the time."""
    logs = {slow: tmp_path / slow / "log" for slow in ("saving", "compiling")}
    for log in logs.values():
        log.parent.mkdir()
    with ThreadPoolExecutor(len(logs)) as pool:
        codes = list(pool.map(_exit_codes, logs, logs.values()))
    for slow, own in zip(logs, codes, strict=True):
        assert own == [0, 0, 0], slow
        assert "has not ended" not in logs[slow].read_text(), slow


def _judge_alone(foreign: int, log: Path) -> None:
    """A rank whose neighbour is silent, by what the store says a process of this host that is none of its ranks."""
    print_to(log)
    store = dist.HashStore()
    sign = {"carried": "llm", "host": socket.gethostname(), "pid": foreign, "count": 1, "at": "elsewhere", "what": "x"}
    store.set("alive/1", json.dumps(sign | {"graphs": 0, "is_compiling": False}))
    watch = PeerWatch(store, 0, "llm stage 0 replica 0", 2, 0.5)
    watch.begin("step 1", 0.5)
    watch.run()


def test_a_process_number_that_a_stranger_wrote_into_the_store_kills_nothing(tmp_path):
    context = multiprocessing.get_context("forkserver")
    stranger = subprocess.Popen(["sleep", "1000"])
    rank = context.Process(target=_judge_alone, args=(stranger.pid, tmp_path / "log"))
    try:
        rank.start()
        rank.join()
        assert f"process {stranger.pid} of" in (tmp_path / "log").read_text()
        assert rank.exitcode == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def _keep_store(port: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    store.wait(["alive/0"])
    os._exit(0)


def _lose_first_node(port: int, log: Path) -> None:
    print_to(log)
    peers._AFTER_STORE_S = 0.5
    watch = PeerWatch(dist.TCPStore("127.0.0.1", port, is_master=False), 0, "llm stage 0 replica 0", 1, _TIMEOUT_S)
    watch.start()
    time.sleep(1000)


def test_a_rank_ends_soon_after_the_first_node(tmp_path):
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    first_node = context.Process(target=_keep_store, args=(sender,))
    first_node.start()
    rank = context.Process(target=_lose_first_node, args=(receiver.recv(), tmp_path / "log"))
    try:
        rank.start()
        rank.join()
        assert rank.exitcode == 1
        assert "dflop: rank 0 (llm stage 0 replica 0) ends, as the ranks' store" in (tmp_path / "log").read_text(
            errors="replace"
        )
    finally:
        for process in (first_node, rank):
            process.kill()
            process.join()


def _hang_at_start(rank: int) -> None:
    trainer._STARTING_S = 2 * _TIMEOUT_S
    if rank == 1:
        trainer.build_rank_model = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_hangs_while_it_builds_the_model_is_named(run, tmp_path):
    folder, config = run
    config = config | {"train": config["train"] | {"peer_timeout_s": 2 * _TIMEOUT_S}}
    arguments = ["train", "--config", json.dumps(config), "--shapes", str(folder / "shapes.duckdb")]
    arguments += ["--plan", str(plan_file(folder)), "--costs", str(folder / "costs.duckdb")]
    log = tmp_path / "log"
    assert run_command([*arguments, "--out", str(tmp_path / "out")], log, _hang_at_start) != 0
    (said,) = [line for line in log.read_text().splitlines() if "no sign of life" in line]
    assert re.search(r"dflop: starting has not ended for \d+ s .*: rank 1 \(", said)
    assert "rank 0" not in said


def _meet_nobody(log: Path, holds_interpreter: bool) -> None:
    print_to(log)
    peers._NO_INTERPRETER_S = 0.5
    with peers.meeting(1.0):
        if holds_interpreter:
            ctypes.PyDLL(None).sleep(1000)  # as a library that keeps Python's lock
        time.sleep(1000)


@pytest.mark.parametrize("holds_interpreter", [False, True])
def test_a_rank_that_cannot_meet_the_others_ends_and_says_where_it_waits(tmp_path, holds_interpreter):
    rank = multiprocessing.get_context("forkserver").Process(
        target=_meet_nobody, args=(tmp_path / "log", holds_interpreter)
    )
    try:
        rank.start()
        rank.join()
    finally:
        rank.kill()
        rank.join()
    said = (tmp_path / "log").read_text()
    assert rank.exitcode == 1
    assert ("has not met the other ranks for 1 s. Do the nodes reach each other?" in said) == (not holds_interpreter)
    assert "in _meet_nobody" in said


def test_a_step_may_take_the_time_out_or_a_few_times_what_is_known_of_it():
    assert longest_wait_s(60, 1.0, 2.0) == 60
    assert longest_wait_s(60, 20.0, 2.0) == 100
    assert longest_wait_s(60, 1.0, 30.0) == 150
