"""Starting torchrun, in the same way for measuring as for training. The ranks end when their parent process ends.

`python -m dflop.base.torchrun` runs torchrun itself. It says in one line which rank failed first, and with which
exit code or signal; the rank itself has printed why. Ranks that can stop by themselves are asked to stop, and are given
the time that they need. The functions that other modules import from here import no torch.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflop.base.first_node import slurm_nodes, slurm_rank
from dflop.base.gpu_environment import gpu_environment
from dflop.base.meeting import LOOPBACK, in_a_folder, names_of_nodes, over_machines
from dflop.base.signals import STOP_SIGNALS, SignalListener, children_of, stop_signals_blocked
from dflop.config import ClusterConfig

__all__ = ["check_nodes", "is_first_node", "run_ranks", "threads_per_rank"]

_POLL_S = 0.2
# This argument stands before torchrun's own. It says that the ranks stop by themselves when they are asked to.
_ASKS_FIRST = "--asks-first"
# Seconds between two requests to the ranks: requests are repeated so that ranks that start later get one, too.
_BETWEEN_ASKING_S = 1.0


def run_ranks(
    module: str,
    request: Mapping[str, object],
    cluster: ClusterConfig,
    *,
    num_nodes: int,
    per_node: int,
    asks_first: bool = False,
    shared: Path | None = None,
) -> tuple[int, list[int]]:
    """Run `main(request)` of a module on `per_node` ranks of each of `num_nodes` nodes, to its end (`rank.py`).

    In a Slurm job this command runs on each node and starts the ranks of its own node; the nodes find each other by a
    file in the folder `shared`. Outside of a Slurm job, the ranks of several nodes with CPUs all run on this machine:
    that is handy for trying a cluster's layout.

    Returns torchrun's exit code, and the signals that this command got and passed on. Without `asks_first` that is
    SIGTERM, which ends the ranks. With `asks_first` it is SIGTERM or SIGUSR1: either makes torchrun send the ranks
    SIGUSR1, which asks them to stop, and torchrun ends when they have stopped. These ranks start with both signals
    blocked.

    Raises:
        UserError: as `check_nodes`, or when nodes do not find each other.
    """
    is_here = _is_here(cluster, num_nodes)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads_per_rank(cluster, num_nodes if is_here else 1)),
        # Threads that spin while they wait make timings collapse on a busy machine.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "TOKENIZERS_PARALLELISM": "false",
        # A rank that dies in compiled code says where its threads are.
        "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1"),
        **(gpu_environment(os.environ) if cluster.device == "cuda" else {}),
        **(LOOPBACK if is_here else {}),
    }
    job = [f"--nproc-per-node={per_node}", "--module", "dflop.base.rank", module, json.dumps(request)]
    with in_a_folder(num_nodes) if is_here else over_machines(num_nodes, shared) as (nodes, inherited):
        with stop_signals_blocked() if asks_first else contextlib.nullcontext():
            agents = [_start_agent([*node, *job], environment, inherited, asks_first) for node in nodes]
        return _ended(agents, asks_first)


def check_nodes(cluster: ClusterConfig, num_nodes: int) -> None:
    """Raise `UserError` when there are several nodes of GPUs and this runs outside `srun`, or on fewer nodes."""
    if not _is_here(cluster, num_nodes):
        names_of_nodes(num_nodes)


def _is_here(cluster: ClusterConfig, num_nodes: int) -> bool:
    """Whether the ranks of all nodes run on this machine."""
    return num_nodes == 1 or (cluster.device == "cpu" and not slurm_nodes())


def _ended(agents: list[subprocess.Popen], asks_first: bool) -> tuple[int, list[int]]:
    """Pass signals on until all agents have ended or one has failed, and end the others."""
    stopped: list[int] = []

    def pass_on(number: int, _: object) -> None:
        stopped.append(number)
        for agent in agents:
            agent.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS[: 2 if asks_first else 1]}
    try:
        return _code_of_first_failure(agents), stopped
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGHUP)  # which torchrun passes on, and ends the ranks at once
        for agent in agents:
            agent.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start_agent(
    arguments: list[str], environment: Mapping[str, str], inherited: Sequence[int], asks_first: bool
) -> subprocess.Popen:
    before = [_ASKS_FIRST, "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"] if asks_first else []
    command = [sys.executable, "-m", "dflop.base.torchrun", *before, *arguments]
    return subprocess.Popen(command, env=environment, pass_fds=inherited)


def _code_of_first_failure(agents: list[subprocess.Popen]) -> int:
    """Wait until all torchruns have ended or one has failed. Returns its exit code, or 0 if none failed."""
    while running := [agent for agent in agents if agent.poll() is None]:
        if failed := [agent.returncode for agent in agents if agent.returncode]:
            return failed[0]
        if len(running) == len(agents) == 1:
            return running[0].wait()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(_POLL_S)
    return next((agent.returncode for agent in agents if agent.returncode), 0)


def threads_per_rank(cluster: ClusterConfig, num_nodes_here: int = 1) -> int:
    """CPU threads of a rank: on CPUs the ranks of a machine share its cores, beside GPUs one is enough."""
    if cluster.device != "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // (cluster.devices_per_node * num_nodes_here))


def is_first_node(cluster: ClusterConfig) -> bool:
    """Whether this command is the one that prints for all nodes. Each node runs a command of its own."""
    return cluster.num_nodes == 1 or slurm_rank() == 0


def _main() -> int:
    """torchrun without a traceback where a rank fails or a signal ends all ranks."""
    arguments = sys.argv[1:]
    if arguments[:1] == [_ASKS_FIRST]:
        arguments = arguments[1:]
        _ask_ranks_to_stop_on_signals()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from dflop.base.rendezvous import register

    register()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        print(f"dflop: rank {rank} of {_node_name()} ended first, with {how}", file=sys.stderr, flush=True)
        return 1
    except DistError as error:
        where = next((text for text in arguments if text.startswith("--rdzv-endpoint=")), "").partition("=")[2]
        print(
            f"dflop: {_node_name()} does not reach the other nodes at {where}, or has lost them: "
            f"{str(error).splitlines()[0]}",
            file=sys.stderr,
            flush=True,
        )
        return 1
    except SignalException as error:
        print(f"dflop: the ranks of {_node_name()} were stopped by {error.sigval.name}", file=sys.stderr)
        return 1
    return 0


def _node_name() -> str:
    """This node's name: Slurm's name for it where there is one, which may differ from the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _ask_ranks_to_stop_on_signals() -> None:
    """From now on, when a signal asks this process to stop, ask its children, the ranks, to stop.

    When the command that started this process is gone, end the ranks at once: nobody would know of them.
    """
    is_asked = threading.Event()
    SignalListener(lambda number, sender: is_asked.set(), lambda: os.kill(os.getpid(), signal.SIGHUP)).start()

    def ask() -> None:
        is_asked.wait()
        while True:
            for child in children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGUSR1)
            time.sleep(_BETWEEN_ASKING_S)

    threading.Thread(target=ask, daemon=True, name="asking").start()


if __name__ == "__main__":
    sys.exit(_main())
