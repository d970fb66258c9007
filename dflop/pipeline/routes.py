"""Routes: how what a node makes comes to the node that takes it.

A message goes from one worker to another over a channel, which becomes a process group. NCCL has no tags: it delivers
the messages between two ranks of one process group in the order in which they were sent, so the receiver must ask for
them in that order. Forward and backward messages have channels of their own. Bridges and edges inside a module share
them unless they join the same two workers: a colocated worker sends its features long before the hidden states that
go to the same worker.

Between two nodes of one worker nothing is sent: the one hands over what it made to the other.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from dflop.pipeline.instructions import Instruction, Program

__all__ = ["Route", "Routes", "make_routes"]


class Route(NamedTuple):
    """The workers that send and receive a message, by index, and the index of the channel that it takes."""

    sender: int
    receiver: int
    channel: int


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a program's edges, [num_edges] a direction; None for an edge inside a worker."""

    num_channels: int
    forward: tuple[Route | None, ...]
    backward: tuple[Route | None, ...]

    def of(self, edge: int, is_forward: bool) -> Route | None:
        return (self.forward if is_forward else self.backward)[edge]

    def of_transfer(self, item: Instruction) -> Route:
        """The route of a send or a receive."""
        route = self.of(item.edge, item.op.is_forward)
        assert route is not None, f"{item}: both ends of edge {item.edge} are on one worker"
        return route


def make_routes(program: Program) -> Routes:
    """The routes of a program. The first of several workers that carry a node sends and receives for all of them."""
    carriers: list[list[int]] = [[] for _ in program.nodes]
    for index, worker in enumerate(program.workers):
        for node in worker.nodes:
            carriers[node].append(index)
    ends: list[tuple[int, int] | None] = []
    kinds: dict[tuple[int, int], set[bool]] = defaultdict(set)
    for edge in program.edges:
        source, target = carriers[edge.source], carriers[edge.target]
        ends.append(None if set(source) & set(target) else (source[0], target[0]))
        if ends[-1]:
            kinds[ends[-1]].add(edge.is_bridge)
    num_kinds = max(map(len, kinds.values()), default=1)  # 2 where bridges need channels of their own
    forward, backward = [], []
    for edge, pair in zip(program.edges, ends, strict=True):
        channel = 2 * (edge.is_bridge and num_kinds > 1)
        forward.append(pair and Route(*pair, channel))
        backward.append(pair and Route(*reversed(pair), channel + 1))
    return Routes(2 * num_kinds, tuple(forward), tuple(backward))
