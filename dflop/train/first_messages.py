"""The first message between two ranks, before training begins.

NCCL connects two ranks of a communicator at their first message, which takes up to a second. Which ranks exchange
features depends on the batch, so a pair might first meet in any step, and stall it. Here every rank exchanges one value
with each peer of each channel: one operation a channel, in the order of channels, so that no rank waits in a circle.
"""

from collections import defaultdict

import torch
import torch.distributed as dist

from dflop.step.run import Links

__all__ = ["meet_peers", "peers_by_channel"]


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
