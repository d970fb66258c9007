"""Processes for tests, forked from a server that has imported what ranks need: to import it takes seconds a process.

`spawn` runs a function on each rank, which joins a process group by itself. `run_command` runs `dflop` where
its ranks are such processes, too, in place of torchrun's. Tests of what torchrun does, and of how processes die, start
the real command (`training_runs.start_run`).
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import start_processes

from dflop.base import rank
from dflop.base.torchrun import threads_per_rank
from dflop.config import ClusterConfig

__all__ = ["preload", "print_to", "run_command", "spawn"]

_CONTEXT = get_context("forkserver")
_FAMILIES = ("internvl", "llava_onevision", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen3_vl")
_PRELOADED = ("cli", "costs.profile_rank", *(f"models.{family}.runtime" for family in _FAMILIES), "report")


def preload() -> None:
    """Say what the server imports, before it starts. It finds `tests` beside the `dflop` that is installed."""
    _CONTEXT.set_forkserver_preload(
        ["dflop.train.rank", *(f"dflop.{name}" for name in _PRELOADED), "tests.distributed.warmed"]
    )


def spawn(function: Callable[..., None], args: tuple = (), *, nprocs: int) -> None:
    """Call `function(rank, *args)` in so many processes; what one of them raises is raised."""
    context = start_processes(function, args, nprocs, join=False, start_method="forkserver")
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()


def run_command(arguments: list[str], log: Path, before: Callable[[int], object] | None = None) -> int:
    """Run `dflop` with these arguments, which ends by itself; returns its exit code. What it prints goes to `log`.
    If `before` is given, each rank first calls `before(rank)`."""
    log.parent.mkdir(exist_ok=True)
    log.write_bytes(b"")
    ours, theirs = _CONTEXT.Pipe()
    command = _CONTEXT.Process(target=_command, args=(arguments, theirs, log))
    command.start()
    theirs.close()
    try:
        with contextlib.suppress(EOFError):  # a command that starts no ranks
            ours.send(_run_ranks(*ours.recv(), log, before))
        command.join()
        return command.exitcode
    finally:
        command.kill()


def _command(arguments: list[str], ranks: connection.Connection, log: Path) -> None:
    from dflop.base import torchrun
    from dflop.cli import main
    from dflop.train import launch

    def run_ranks(module: str, request: dict, cluster: ClusterConfig, *, per_node: int, **_: Any) -> tuple[int, list]:
        world = {"WORLD_SIZE": per_node, "LOCAL_WORLD_SIZE": per_node, "OMP_NUM_THREADS": threads_per_rank(cluster)}
        ranks.send((module, request, world))
        return ranks.recv(), []

    print_to(log)
    launch.run_ranks = torchrun.run_ranks = run_ranks
    sys.argv = ["dflop", *arguments]
    main()


def _run_ranks(
    module: str, request: dict, world: Mapping[str, int], log: Path, before: Callable[[int], object] | None
) -> int:
    """Run the ranks to their end; returns the exit code of the first that fails, which ends the others."""
    with tempfile.TemporaryDirectory() as folder:
        world = {**world, "MASTER_ADDR": folder}
        ranks = [
            _CONTEXT.Process(
                target=_run_rank, args=(module, request, {**world, "RANK": number, "LOCAL_RANK": number}, log, before)
            )
            for number in range(world["WORLD_SIZE"])
        ]
        for process in ranks:
            process.start()
        try:
            while running := [process.sentinel for process in ranks if process.exitcode is None]:
                connection.wait(running)
                if code := next((process.exitcode for process in ranks if process.exitcode), 0):
                    return code
            return 0
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _run_rank(
    module: str, request: dict, world: Mapping[str, object], log: Path, before: Callable[[int], object] | None
) -> None:
    print_to(log)
    os.environ |= {name: str(value) for name, value in world.items()} | {"TOKENIZERS_PARALLELISM": "false"}
    sys.argv = ["rank", module, json.dumps(request)]
    dist.batch_isend_irecv = _refusing_strangers(dist.batch_isend_irecv)
    if before:
        before(int(world["RANK"]))
    rank.main()


def _refusing_strangers(exchange: Callable[[list[dist.P2POp]], list[dist.Work]]) -> Callable:
    """The exchange of messages, where the first one in each direction between two ranks must be a single value."""
    met = set()

    def refusing(operations: list[dist.P2POp]) -> list[dist.Work]:
        for operation in operations:
            way = operation.op, operation.peer, operation.group
            is_first = way not in met
            assert not is_first or operation.tensor.numel() == 1, f"a step begins with a stranger: {way}"
            met.add(way)
        return exchange(operations)

    return refusing


def print_to(log: Path) -> None:
    """Add what this process prints to a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
