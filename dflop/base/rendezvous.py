"""Where torchrun's agents meet, and the ranks that they start.

On one machine this is a folder that only its user can enter: stores are files in it, and nothing listens. Over several
machines it is torch's TCPStore, which listens at one address of the first machine. It asks for no password: whoever
reaches its port can read and write it. `base.meeting` chooses. Neither unpickles anything.
"""

import contextlib
import fcntl
import os
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from dflop.base.folder_store import FolderStore

__all__ = ["join_ranks", "leave_ranks", "register"]

_BACKEND = "dflop"
_ADDRESS_OF_INTERFACE = 0x8915  # Linux: SIOCGIFADDR
_TIMEOUT, _ONE_TRY = timedelta(minutes=10), timedelta(seconds=20)


def register() -> None:
    """Have torchrun know `--rdzv-backend=dflop`.

    Its endpoint is the folder, or the first machine's address. `--rdzv-conf` has the `rank` of the machine; with an
    address also the `port` and, on the first machine, `listener`, the file descriptor of a socket that listens there.
    """
    rendezvous_handler_registry.register(_BACKEND, _Rendezvous)


class _Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous with a store that does not listen at all addresses."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        port, rank = int(parameters.config.get("port", 0)), int(parameters.config["rank"])
        nodes = parameters.max_nodes, parameters.run_id, round(_TIMEOUT.total_seconds())
        super().__init__(parameters.endpoint, port, rank, *nodes)
        self._listener = int(parameters.config["listener"]) if "listener" in parameters.config else None

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if not self.master_port:
            self._store = dist.FileStore(f"{self.master_addr}/agents")
        else:
            self._store = self._first_machines_store()
        where = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(self._store, self.rank, self.world_size, where)

    def _first_machines_store(self) -> dist.TCPStore:
        """Its machine listens before the others learn the address: nobody listens there once it has failed."""
        where = self.master_addr, self.master_port
        if self._listener is not None:
            options = {"is_master": True, "timeout": self.timeout, "master_listen_fd": self._listener}
            return dist.TCPStore(*where, self.world_size, **options)
        until = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                socket.create_connection(where, timeout=_ONE_TRY.total_seconds()).close()
                store = dist.TCPStore(*where, self.world_size, is_master=False, timeout=_ONE_TRY)
            except ConnectionRefusedError:
                raise dist.DistNetworkError("the first node has ended; see what it says") from None
            except (OSError, dist.DistError):
                if time.monotonic() > until:
                    raise
            else:
                store.set_timeout(self.timeout)
                return store


def join_ranks(backend: str, **options: Any) -> dist.Store:
    """Join the process group of the ranks that torchrun started; `options` are those of `init_process_group`.

    Returns a store for the ranks' messages, whose keys are not the group's.
    """
    folder = Path(os.environ["MASTER_ADDR"])
    if folder.is_absolute():
        of_group, messages = dist.FileStore(str(folder / "group")), FolderStore(folder / "messages", _TIMEOUT)
        of_group.set_timeout(_TIMEOUT)
    else:
        store, _, _ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
        of_group, messages = dist.PrefixStore("group", store), dist.PrefixStore("dflop", store)
        if interface := _interface_to(os.environ["MASTER_ADDR"]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=of_group, rank=rank, world_size=world_size, **options)
    return messages


def _interface_to(address: str) -> str | None:
    """The network interface by which this machine reaches an IPv4 address; None where that is not known. gloo would ask
    for the address of the host's own name, which may be one of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # which sends nothing
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                asked = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                if asked[20:24] == own:
                    return name
    return None


def leave_ranks() -> None:
    """Leave all process groups in the order in which they were made, and at last that of all ranks. All ranks make
    groups in one order, so none waits in a circle.

    torch alone takes groups by their names. Those of split groups differ between ranks that are in other numbers of
    groups (pytorch issue 190396), and NCCL ends a communicator on all of its ranks together.
    """
    for group in list(_world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    dist.destroy_process_group()
