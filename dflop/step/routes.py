"""Edges and routes: which data flows between nodes, and between which of their workers it is sent.

A message goes from one worker to another over a channel, which becomes a communicator of all ranks. There are few, at
most eight, whatever the number of ranks: one in each direction for bridges, and two or three in each direction for
edges inside a module. These take turns along the pipeline, so that a worker never receives over the channel over which
it sends on: a microbatch that is late does not hold up the one before it.

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

__all__ = ["Edge", "Route", "Routes", "channels_of", "edges_of", "lanes_of", "make_routes", "track_of"]

_BRIDGE = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """Data flows from node `source` to node `target` in the forward pass, and back in the backward pass.

    `track` is 0 for bridges; for edges inside a module it is 1, 2 or 3, another one before and behind each stage.
    """

    source: int
    target: int
    track: int

    @property
    def is_bridge(self) -> bool:
        return self.track == _BRIDGE

    def channel(self, is_forward: bool) -> int:
        """The index of the communicator for the edge's messages in this direction."""
        return 2 * self.track + (not is_forward)


class Route(NamedTuple):
    """The workers that send and receive a message, by index."""

    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of each edge in either direction; an edge has none where every receiving worker makes its data
    itself."""

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
        Edge(stage.first_node + source, first_llm.first_node + target, _BRIDGE)
        for stage in stages
        if stage.module != "llm" and stage.pp_stage == plan.num_stages(stage.module) - 1
        for source in range(stage.dp)
        for target in PLACEMENTS[plan.placement].bridged_replicas(source, first_llm.dp)
    ]
    inside = [
        Edge(source, source + stage.dp, track_of(stage.pp_stage, plan.grid(stage.module).pp))
        for stage in stages
        if stage.pp_stage < plan.num_stages(stage.module) - 1
        for source in range(stage.first_node, stage.first_node + stage.dp)
    ]
    return (*bridges, *inside)


def make_routes(workers: Sequence[Worker], edges: Sequence[Edge]) -> Routes:
    """The routes of all edges between these workers' nodes."""
    carriers: dict[int, list[int]] = defaultdict(list)
    for index, worker in enumerate(workers):
        for node in worker.nodes:
            carriers[node].append(index)
    return Routes(
        tuple(_routes(carriers[edge.source], carriers[edge.target]) for edge in edges),
        tuple(_routes(carriers[edge.target], carriers[edge.source]) for edge in edges),
    )


def track_of(stage: int, pp: int) -> int:
    """The track from this stage to the next; the last rank of an odd number of them leads back to the first."""
    place = stage % pp
    return 3 if place == pp - 1 and pp % 2 else 1 + place % 2


def channels_of(edges: Sequence[Edge], routes: Routes) -> list[int]:
    """The channels over which there are messages, at most eight."""
    ways = ((number, is_forward) for number in range(len(edges)) for is_forward in (True, False))
    return sorted({edges[number].channel(is_forward) for number, is_forward in ways if routes.of(number, is_forward)})


def lanes_of(num_sending: int, num_receiving: int) -> list[tuple[int, int]]:
    """For each rank of a receiving worker, the rank of the sending worker that its message comes from: pairs (place in
    the sending worker, place in the receiving worker)."""
    return [(place * num_sending // num_receiving, place) for place in range(num_receiving)]


def _routes(makers: Sequence[int], takers: Sequence[int]) -> tuple[Route, ...]:
    """The messages from the workers of one node to those of another."""
    return tuple(
        Route(makers[place * len(makers) // len(takers)], taker)
        for place, taker in enumerate(takers)
        if taker not in makers
    )
