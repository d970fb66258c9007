"""Measuring links: the seconds of transfers between ranks and of gradient syncs by size, with training's backend, those
of copies to the host's memory and back, and the memory of a communicator on GPUs.

torchrun starts a rank on every device of the cluster (`main`); rank 0 writes the Parquet file. One group of ranks
measures at a time, and all ranks learn each result, so that they agree on when to stop. The network is otherwise idle:
in training, transfers may share it and compete with computations.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import polars as pl
import torch
import torch.distributed as dist

from dflop.base import progress_bar
from dflop.base.collectives import all_gather_flat, reduce_scatter_flat
from dflop.base.local_device import local_device
from dflop.base.message_group import message_group
from dflop.base.rendezvous import join_ranks, leave_ranks
from dflop.costs.link_model import COMMUNICATOR, HOST
from dflop.models.microbatch import Exchange
from dflop.models.shared_samples import exchanged
from dflop.store import LINKS_SCHEMA, write_parquet

__all__ = ["LinkGroup", "communicator_row", "groups_to_measure", "main", "sizes_up_to"]

_TIMEOUT = timedelta(minutes=5)  # ranks of many nodes may start this far apart
_LEAST_BYTES = 1024
_LONGEST_TRANSFER_S = 0.25
_LEAST_SIZES = 3
# Short transfers vary most and cost least: a repeat is the median of up to `_MOST_RUNS` runs, of `_BYTES_OF_RUNS` bytes
# together.
_MOST_RUNS, _BYTES_OF_RUNS = 16, 2**20
_COMMUNICATOR_VALUES = 2**22
_ROW = 32  # values of an exchanged row: 1 KiB is one row for each of seven others


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """Ranks to measure together; `kind` is host, p2p, exchange or gradient_sync, `scope` intra (one node) or inter
    (several)."""

    kind: str
    scope: str
    ranks: tuple[int, ...]


def groups_to_measure(num_nodes: int, per_node: int) -> list[LinkGroup]:
    """A pair, then 2, 4, … and all ranks: first inside a node, then over nodes. Inside a node, as many as may share a
    sample also exchange keys and values, and before all else each copies to the host's memory.

    Ranks are consecutive, as a stage's replicas are. Small groups over nodes have half of their ranks on either node.
    """
    groups = [LinkGroup(HOST, "intra", tuple(range(per_node)))]
    if per_node > 1:
        groups.append(LinkGroup("p2p", "intra", (0, 1)))
        sizes = (size for size in (2, 4, 8) if size <= per_node)
        groups += [LinkGroup("exchange", "intra", tuple(range(size))) for size in sizes]
        groups += [LinkGroup("gradient_sync", "intra", tuple(range(size))) for size in _doublings(per_node)]
    if num_nodes > 1:
        groups.append(LinkGroup("p2p", "inter", (per_node - 1, per_node)))
        for size in _doublings(num_nodes * per_node):
            first = max(0, per_node - size // 2)
            groups.append(LinkGroup("gradient_sync", "inter", tuple(range(first, first + size))))
    return groups


def _doublings(limit: int) -> list[int]:
    return [*(1 << power for power in range(1, (limit - 1).bit_length())), limit]


def sizes_up_to(max_bytes: int) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB, …"""
    sizes = [_LEAST_BYTES]
    while sizes[-1] * 4 <= max_bytes:
        sizes.append(sizes[-1] * 4)
    return sizes


def _measure(
    groups: list[LinkGroup], sizes: list[int], repeats: int, device: torch.device, progress: Callable[[str], None]
) -> pl.DataFrame:
    """Rows of `LINKS_SCHEMA`, the same on every rank. A group measures no larger sizes once a transfer takes too long.

    Sizes take turns, so that what disturbs the machine for a moment spoils one repeat of several sizes, and not all
    repeats of one.
    """
    rows = []
    of_all = dict.fromkeys(group.ranks for group in groups if group.kind != "p2p")
    members = {ranks: dist.new_group(ranks, timeout=_TIMEOUT) for ranks in of_all}
    messages = message_group(device, _TIMEOUT)
    for group in groups:
        own_sizes = list(sizes)
        for repeat in range(repeats):
            for count, num_bytes in enumerate(own_sizes, start=1):
                progress(f"{group.kind} {group.scope}, {len(group.ranks)} ranks, {num_bytes:,} bytes")
                among = messages if group.kind == "p2p" else members[group.ranks]
                seconds = _time(group, among, num_bytes, device)
                rows.append((group.kind, group.scope, len(group.ranks), num_bytes, seconds, repeat))
                if repeat == 0 and count >= _LEAST_SIZES and seconds > _LONGEST_TRANSFER_S:
                    own_sizes = sizes[:count]
                    break
    return pl.DataFrame(rows, schema=LINKS_SCHEMA, orient="row")


def communicator_row(
    scope: str, device: torch.device, free_bytes: Callable[[], int]
) -> tuple[str, str, int, int, float, int]:
    """A row of `LINKS_SCHEMA` on a communicator of all ranks, used as training does: for a sum, and for messages to all
    other ranks, each of which takes buffers of its own. `free_bytes` gives the device's free memory; the bytes are
    those of the rank where it takes most."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    values, received = (torch.zeros(_COMMUNICATOR_VALUES, device=device) for _ in range(2))
    most = torch.zeros(1, dtype=torch.float64, device=device)
    dist.all_reduce(most)  # the world's communicator is there
    _now(device)
    before, started_s = free_bytes(), time.perf_counter()
    group = dist.new_group(timeout=_TIMEOUT)
    dist.all_reduce(values, group=group)
    for away in range(1, num_ranks):
        ends = (dist.isend, values, (rank + away) % num_ranks), (dist.irecv, received, (rank - away) % num_ranks)
        for work in dist.batch_isend_irecv([dist.P2POp(how, tensor, peer, group) for how, tensor, peer in ends]):
            work.wait()
    seconds = _now(device) - started_s
    most[0] = max(0, before - free_bytes())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return COMMUNICATOR, scope, num_ranks, int(most), seconds, 0


def _time(group: LinkGroup, members: dist.ProcessGroup, num_bytes: int, device: torch.device) -> float:
    """The median over several runs, after a warm-up, of the slowest rank's seconds; all ranks must call this."""
    num_runs = max(1, min(_MOST_RUNS, _BYTES_OF_RUNS // num_bytes))
    seconds = torch.zeros(num_runs, dtype=torch.float64, device=device)
    if dist.get_rank() in group.ranks:
        values = torch.zeros(num_bytes // 4, device=device)
        timed = [_time_once(group, members, values) for _ in range(1 + num_runs)]
        seconds.copy_(torch.tensor(timed[1:], dtype=torch.float64))
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.median().item()


def _time_once(group: LinkGroup, members: dist.ProcessGroup, values: torch.Tensor) -> float:
    """Seconds on this rank from the moment when all ranks of the group are ready.

    The time of a transfer is half a round trip by the first rank's clock: the clocks of two hosts differ, and ranks
    leave a barrier further apart in time than a short message takes.
    """
    if group.kind == "exchange":
        return _time_exchange(members, values)
    if group.kind == HOST:
        return _time_copies(members, values)
    if group.kind == "gradient_sync":
        dist.barrier(members)
        started = _now(values.device)
        share = len(values) // len(group.ranks)
        values, own = values[: share * len(group.ranks)], values[members.rank() * share :][:share]
        reduce_scatter_flat(own, values, members).wait()
        all_gather_flat(values, own, members).wait()
        return _now(values.device) - started
    first, second = group.ranks
    if dist.get_rank() == second:
        dist.isend(values[:1], dst=first, group=members).wait()  # it is ready
        dist.irecv(values, src=first, group=members).wait()
        dist.isend(values, dst=first, group=members).wait()
        _now(values.device)
        return 0.0
    dist.irecv(values[:1], src=second, group=members).wait()
    started = _now(values.device)
    dist.isend(values, dst=second, group=members).wait()
    dist.irecv(values, src=second, group=members).wait()
    return (_now(values.device) - started) / 2


def _time_exchange(members: dist.ProcessGroup, received: torch.Tensor) -> float:
    """Seconds in which each rank gets `received` from all others together, as many rows from each, and puts it behind
    its own rows: what a layer does where samples are shared (`models.shared_samples`)."""
    num_others = members.size() - 1
    rows = received[: len(received) // num_others // _ROW * num_others * _ROW].view(-1, _ROW)
    own = rows[: len(rows) // num_others]
    counts = tuple(len(own) * (member != members.rank()) for member in range(members.size()))
    sent = torch.arange(len(own), device=own.device).repeat(num_others)
    exchange = Exchange(rows=sent, num_sent=counts, num_received=counts, group=members)
    order = torch.arange(len(own) + len(rows), device=own.device)
    dist.barrier(members)
    started = _now(own.device)
    torch.cat([own, exchanged(own, exchange)]).index_select(0, order)
    return _now(own.device) - started


def _time_copies(members: dist.ProcessGroup, values: torch.Tensor) -> float:
    """Seconds of a copy to the host's memory, half of those of one there and one back, while all members copy."""
    kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    dist.barrier(members)
    started = _now(values.device)
    kept.copy_(values, non_blocking=True)
    values.copy_(kept, non_blocking=True)
    return (_now(values.device) - started) / 2


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _join_world(device_kind: str) -> torch.device:
    device = local_device(device_kind)
    if device_kind == "cpu":
        join_ranks("gloo", timeout=_TIMEOUT)
    else:
        join_ranks("nccl", timeout=_TIMEOUT, device_id=device)
    return device


def main(request: dict) -> None:
    """What every rank does; the request has device, repeats, max_bytes and out."""
    device = _join_world(request["device"])
    is_main, per_node = dist.get_rank() == 0, int(os.environ["LOCAL_WORLD_SIZE"])
    groups, sizes = groups_to_measure(dist.get_world_size() // per_node, per_node), sizes_up_to(request["max_bytes"])
    total = len(groups) * len(sizes) * request["repeats"]
    with progress_bar(total=total, unit="size", disable=not is_main) as bar:

        def progress(text: str) -> None:
            bar.set_description(text, refresh=False)
            bar.update()

        frame = _measure(groups, sizes, request["repeats"], device, progress)
    if device.type == "cuda" and dist.get_world_size() > 1:
        scope = "inter" if dist.get_world_size() > per_node else "intra"
        row = communicator_row(scope, device, lambda: torch.cuda.mem_get_info(device)[0])
        frame = pl.concat([frame, pl.DataFrame([row], schema=LINKS_SCHEMA, orient="row")])
    if is_main:
        write_parquet(frame, Path(request["out"]))
    dist.barrier()  # so that the file is there when any node's command ends
    leave_ranks()
