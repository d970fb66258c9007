"""The first message between two ranks, and the first in each group, before training begins.

NCCL connects two ranks of a communicator at their first message, which takes up to a second. Which ranks exchange
features depends on the batch, so a pair might first meet in any step, and stall it. Here every rank exchanges one value
with each peer of each channel: one operation a channel, in the order of channels, so that no rank waits in a circle.
In a group, connections are made at the first collective of a kind, for which the program waits on all of its ranks.
"""

from collections import defaultdict

import torch
import torch.distributed as dist

from dflop.base.collectives import all_gather_flat, reduce_scatter_flat
from dflop.step.run import Links
from dflop.train.topology import Topology

__all__ = ["meet_groups", "meet_peers", "peers_by_channel"]

# So many values go through a group of replicas: as many as make NCCL send in the way of a large message.
_NUM_VALUES = 1 << 22


def peers_by_channel(links: Links) -> dict[int, tuple[list[int], list[int]]]:
    """By channel, in order, the ranks that this rank sends to and those that it receives from, each once."""
    found: dict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for wires in links.sends.values():
        for wire in wires:
            found[wire.channel][0].add(wire.peer)
    for wire in links.receives.values():
        found[wire.channel][1].add(wire.peer)
    return {channel: (sorted(found[channel][0]), sorted(found[channel][1])) for channel in sorted(found)}


def meet_peers(links: Links) -> None:
    """Exchange a value with each peer of each channel; every rank must call this."""
    wires = [*links.receives.values(), *(wire for sent in links.sends.values() for wire in sent)]
    groups = {wire.channel: wire.group for wire in wires}
    for channel, (receivers, senders) in peers_by_channel(links).items():
        operations = [
            dist.P2POp(how, torch.zeros(1, device=links.device), peer, groups[channel])
            for how, peers in ((dist.isend, receivers), (dist.irecv, senders))
            for peer in peers
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    if links.device.type == "cuda":
        torch.cuda.synchronize(links.device)


def meet_groups(topology: Topology) -> None:
    """Run the collectives in this rank's groups that a step has and warming up (`warm_up`) has not; every rank must
    call this. Groups of one purpose and module share no rank, and all ranks take these in one order, so that none waits
    in a circle."""
    device, met = topology.device, set()

    def meets(group: dist.ProcessGroup | None) -> bool:
        is_new = group is not None and group not in met
        met.add(group)
        return is_new

    dist.all_reduce(torch.zeros(1, device=device))
    for node in sorted(topology.nodes):
        replicas, tensor, samples = topology.replicas[node], topology.tensor[node].group, topology.samples.get(node)
        if node not in topology.sharers and meets(replicas):
            own = torch.zeros(max(1, _NUM_VALUES // replicas.size()), device=device)
            values = own.new_zeros(len(own) * replicas.size())
            reduce_scatter_flat(own, values, replicas).wait()
            all_gather_flat(values, own, replicas).wait()
        if meets(tensor):
            dist.all_reduce(torch.zeros(1, device=device), group=tensor)
        if meets(samples):
            rows = torch.zeros(samples.size(), device=device)
            dist.all_to_all_single(torch.empty_like(rows), rows, group=samples)
        if (ends := topology.tied.get(node)) and meets(ends.group):
            value = torch.zeros(1, device=device)
            dist.reduce(value, dst=ends.owner, group=ends.group)
            dist.broadcast(value, src=ends.owner, group=ends.group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
