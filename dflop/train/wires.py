"""Wires: for each edge, which ranks this one sends to and receives from, and over which process groups."""

from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist

from dflop.base.message_group import message_group
from dflop.step import Program
from dflop.step.receiving import receiver_on
from dflop.step.routes import channels_of, lanes_of, make_routes
from dflop.step.run import Links, Wire

__all__ = ["make_links"]


def make_links(program: Program, worker: int, device: torch.device, dtype: torch.dtype, timeout: timedelta) -> Links:
    """The links of this rank, which is one of the worker number `worker`. Every rank makes the same groups, in the same
    order: one of all ranks for each channel (`routes`)."""
    rank, routes = dist.get_rank(), make_routes(program.workers, program.edges)
    groups = {channel: message_group(device, timeout) for channel in channels_of(program.edges, routes)}
    sends: dict[tuple[int, bool], list[Wire]] = defaultdict(list)
    receives: dict[tuple[int, bool], Wire] = {}
    for number, edge in enumerate(program.edges):
        for is_forward in (True, False):
            channel = edge.channel(is_forward)
            for route in routes.of(number, is_forward):
                sender, receiver = program.workers[route.sender], program.workers[route.receiver]
                for here, there in lanes_of(sender.num_ranks, receiver.num_ranks):
                    if sender.first_rank + here == rank:
                        wire = Wire(receiver.first_rank + there, channel, groups[channel])
                        sends[number, is_forward].append(wire)
                    if receiver.first_rank + there == rank:
                        receives[number, is_forward] = Wire(sender.first_rank + here, channel, groups[channel])
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
        receiver=receiver_on(device, dtype),
    )
