"""Wires: for each edge, which ranks this one sends to and receives from, and over which process groups."""

from collections import defaultdict
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from dflop.step import Program
from dflop.step.routes import Route, lanes_of, make_routes
from dflop.step.run import Links, Wire

__all__ = ["make_links"]


class _Pair(NamedTuple):
    sender: int
    receiver: int
    channel: int


def make_links(
    program: Program,
    worker: int,
    device: torch.device,
    dtype: torch.dtype,
    timeout: timedelta,
    *,
    groups_by_route: bool,
) -> Links:
    """The links of this rank, which is one of the worker number `worker`. Every rank makes all groups, in the same
    order.

    NCCL sends the messages of a communicator one after the other, whoever their receivers are, and a large send waits
    for its receiver. With one communicator for all routes, two ranks could each wait for what the other one sends
    later. So with NCCL each pair of ranks has a communicator for each channel between them (`groups_by_route`). Gloo
    delivers each message independently, so one group for each channel is enough.
    """
    rank, routes = dist.get_rank(), make_routes(program.workers, program.edges)
    pairs = {route: _pairs(program, route) for own in (*routes.forward, *routes.backward) for route in own}
    if groups_by_route:
        groups = {
            pair: dist.new_group([pair.sender, pair.receiver], timeout=timeout)
            for pair in sorted({pair for own in pairs.values() for pair in own})
        }
    else:
        channels = [dist.new_group(timeout=timeout) for _ in range(routes.num_channels)]
        groups = {pair: channels[pair.channel] for own in pairs.values() for pair in own}
    sends: dict[tuple[int, bool], list[Wire]] = defaultdict(list)
    receives: dict[tuple[int, bool], Wire] = {}
    for number in range(len(program.edges)):
        for is_forward in (True, False):
            for pair in (pair for route in routes.of(number, is_forward) for pair in pairs[route]):
                if pair.sender == rank:
                    sends[number, is_forward].append(Wire(pair.receiver, groups[pair]))
                if pair.receiver == rank:
                    receives[number, is_forward] = Wire(pair.sender, groups[pair])
    own_nodes = set(program.workers[worker].nodes)
    inner = {number for number, edge in enumerate(program.edges) if {edge.source, edge.target} <= own_nodes}
    return Links(
        edges=program.edges,
        sends={key: tuple(wires) for key, wires in sends.items()},
        receives=receives,
        inner=inner,
        shared={(number, way) for number in inner for way in (True, False) if routes.of(number, way)},
        device=device,
        dtype=dtype,
    )


def _pairs(program: Program, route: Route) -> list[_Pair]:
    """The pairs of ranks between which a message between two workers goes."""
    sender, receiver = program.workers[route.sender], program.workers[route.receiver]
    return [
        _Pair(sender.first_rank + here, receiver.first_rank + there, route.channel)
        for here, there in lanes_of(sender.num_ranks, receiver.num_ranks)
    ]
