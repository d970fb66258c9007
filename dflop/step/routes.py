"""Edges and routes: which data flows between nodes, and between which of their workers it is sent.

A message goes from one worker to another over a channel, which becomes a process group. NCCL has no tags: it delivers
the messages between two ranks of one process group in the order in which they were sent, so the receiver must ask for
them in that order. Forward and backward messages have channels of their own. Bridges and edges inside a module share
them unless they join the same two workers: a colocated worker sends its features long before the hidden states that
go to the same worker.

Each rank of a node has the node's whole output. So a worker that carries both ends of an edge hands the output over,
and every other worker of the receiving node gets one message from one worker of the sending node. Where workers have
several ranks, each receiving rank gets the message from one sending rank (`lanes_of`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan
from dflop.step.nodes import Worker, stages_of

__all__ = ["Edge", "Route", "Routes", "edges_of", "lanes_of", "make_routes"]


@dataclass(frozen=True, slots=True)
class Edge:
    """Data flows from node `source` to node `target` in the forward pass, and back in the backward pass."""

    source: int
    target: int
    is_bridge: bool


class Route(NamedTuple):
    """The workers that send and receive a message, by index, and the index of the channel that it takes."""

    sender: int
    receiver: int
    channel: int


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of each edge in either direction; an edge has none where every receiving worker makes its data
    itself."""

    num_channels: int
    forward: tuple[tuple[Route, ...], ...]
    backward: tuple[tuple[Route, ...], ...]

    def of(self, edge: int, is_forward: bool) -> tuple[Route, ...]:
        """The routes of the edge with this index, in the forward or the backward pass."""
        return (self.forward if is_forward else self.backward)[edge]


def edges_of(plan: Plan) -> tuple[Edge, ...]:
    """All edges of a plan, bridges first. A bridge joins each encoder replica to each LLM replica, or, where the two
    modules share a grid, to the LLM replica on its own ranks."""
    stages = stages_of(plan)
    first_llm = next(stage for stage in stages if stage.module == "llm")
    bridges = [
        Edge(stage.first_node + source, first_llm.first_node + target, True)
        for stage in stages
        if stage.module != "llm" and stage.pp_stage == plan.num_stages(stage.module) - 1
        for source in range(stage.dp)
        for target in PLACEMENTS[plan.placement].bridged_replicas(source, first_llm.dp)
    ]
    inside = [
        Edge(stage.first_node + replica, stage.first_node + stage.dp + replica, False)
        for stage in stages
        if stage.pp_stage < plan.num_stages(stage.module) - 1
        for replica in range(stage.dp)
    ]
    return (*bridges, *inside)


def make_routes(workers: Sequence[Worker], edges: Sequence[Edge]) -> Routes:
    """The routes of all edges between these workers' nodes."""
    carriers: dict[int, list[int]] = defaultdict(list)
    for index, worker in enumerate(workers):
        for node in worker.nodes:
            carriers[node].append(index)
    pairs: list[list[list[tuple[int, int]]]] = [
        [_pairs(carriers[edge.source], carriers[edge.target]) for edge in edges],
        [_pairs(carriers[edge.target], carriers[edge.source]) for edge in edges],
    ]
    kinds: dict[tuple[int, tuple[int, int]], set[bool]] = defaultdict(set)
    for way, of_edges in enumerate(pairs):
        for edge, own in zip(edges, of_edges, strict=True):
            for pair in own:
                kinds[way, pair].add(edge.is_bridge)
    num_kinds = max(map(len, kinds.values()), default=1)  # 2 where bridges need channels of their own
    forward, backward = (
        tuple(
            tuple(Route(*pair, 2 * (edge.is_bridge and num_kinds > 1) + way) for pair in own)
            for edge, own in zip(edges, of_edges, strict=True)
        )
        for way, of_edges in enumerate(pairs)
    )
    return Routes(2 * num_kinds, forward, backward)


def lanes_of(num_sending: int, num_receiving: int) -> list[tuple[int, int]]:
    """For each rank of a receiving worker, the rank of the sending worker that its message comes from: pairs (place in
    the sending worker, place in the receiving worker)."""
    return [(place * num_sending // num_receiving, place) for place in range(num_receiving)]


def _pairs(makers: Sequence[int], takers: Sequence[int]) -> list[tuple[int, int]]:
    """Sender and receiver of each message between the workers of two nodes."""
    return [
        (makers[place * len(makers) // len(takers)], taker) for place, taker in enumerate(takers) if taker not in makers
    ]
