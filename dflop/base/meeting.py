"""How the machines of a job find each other: torchrun's arguments for `base.rendezvous`, and what they name.

On one machine nothing listens but gloo and NCCL, on loopback. Over several machines the first one listens at the
address by which it reaches the second, at a port that the system chooses, and tells the others (`first_node`). This
file imports no torch.
"""

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dflop.base.errors import UserError
from dflop.base.first_node import hear, slurm_nodes, slurm_rank, told

__all__ = ["LOOPBACK", "in_a_folder", "names_of_nodes", "over_machines"]

# The environment of ranks that are all on one machine.
LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
_PORT_VARIABLE = "DFLOP_RENDEZVOUS_PORT"


@contextlib.contextmanager
def in_a_folder(num_nodes: int) -> Iterator[tuple[list[list[str]], list[int]]]:
    """torchrun's arguments for each node, where all are on this machine, while their folder is there."""
    with tempfile.TemporaryDirectory(prefix="dflop-", ignore_cleanup_errors=True) as folder:  # of mode 0700
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_SH)  # systemd cleans up what is old below /tmp, but nothing that is locked
            yield [_arguments(num_nodes, folder, rank=node) for node in range(num_nodes)], []
        finally:
            os.close(held)


@contextlib.contextmanager
def over_machines(num_nodes: int, shared: Path) -> Iterator[tuple[list[list[str]], list[int]]]:
    """torchrun's arguments for this node of a Slurm step, and the file descriptors that it inherits.

    `shared` is a folder that all nodes see. The nodes' files there are deleted in the end.

    Raises:
        UserError: as `names_of_nodes`, when the environment variable for the port holds no port or one that is taken,
            or when another node does not come for ten minutes; on other nodes, the first one's last words
            (`first_node`).
    """
    names = names_of_nodes(num_nodes)
    if rank := slurm_rank():
        said = hear(shared)
        yield [_arguments(num_nodes, said["address"], rank=rank, port=said["port"])], []
        return
    own = os.environ.get("SLURMD_NODENAME", names[0])
    with _listener(next((name for name in names if name != own), names[1])) as listener:
        address, port, *_ = listener.getsockname()
        with told(shared, num_nodes, {"address": address, "port": port}):
            number = listener.fileno()
            yield [_arguments(num_nodes, address, rank=0, port=port, listener=number)], [number]


def names_of_nodes(num_nodes: int) -> list[str]:
    """The host names of a Slurm step's nodes.

    Raises:
        UserError: when this runs outside `srun` or on fewer nodes, with the way to start it.
    """
    nodes = slurm_nodes()
    if not nodes:
        raise UserError(
            f"`cluster.num_nodes` is {num_nodes}, and each node runs this command: run this inside `srun` of a Slurm "
            f"job of {num_nodes} nodes with all their GPUs (`srun --nodes={num_nodes} --ntasks-per-node=1 dflop …`), "
            "or let the workflow submit it (`snakemake --profile slurm …`)"
        )
    names = _of_slurm("hostnames", nodes).split()
    if len(names) < num_nodes:
        raise UserError(f"`cluster.num_nodes` is {num_nodes}, this Slurm job has {len(names)} node(s); make them equal")
    return names


def _arguments(num_nodes: int, endpoint: str, **config: int) -> list[str]:
    conf = ",".join(f"{name}={value}" for name, value in config.items())
    return [f"--nnodes={num_nodes}", "--rdzv-backend=dflop", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}"]


def _listener(other: str) -> socket.socket:
    """A socket that listens at the address by which this machine reaches another node."""
    family, kind, protocol, _, there = socket.getaddrinfo(_address_of(other), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # which sends nothing
        address = probe.getsockname()[0]
    port = _port()
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise UserError(f"{address} port {port}: {error.strerror}; name another one in {_PORT_VARIABLE}") from None


def _port() -> int:
    """The port that the environment names; 0, any free one, if it names none."""
    named = os.environ.get(_PORT_VARIABLE)
    if named is None:
        return 0
    if not named.isdecimal() or not 1024 <= int(named) < 65_536:
        raise UserError(f"{_PORT_VARIABLE} is {named!r}; it must be a port's number from 1024 to 65535, or not be set")
    return int(named)


def _of_slurm(kind: str, name: str) -> str:
    asked = subprocess.run(["scontrol", "show", kind, name], capture_output=True, text=True)
    if asked.returncode:
        raise UserError(f"`scontrol show {kind} {name}` failed: {asked.stderr.strip()}; ask Slurm's administrators")
    return asked.stdout


def _address_of(node: str) -> str:
    """A node's name; where the name cannot be resolved here, the address by which Slurm reaches the node."""
    try:
        socket.getaddrinfo(node, None)
    except socket.gaierror:
        found = re.search(r"NodeAddr=(\S+)", _of_slurm("node", node))
        return found[1] if found else node
    return node
