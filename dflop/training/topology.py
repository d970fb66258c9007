"""Who is who: the nodes of the plan that this rank carries, and the process groups that they need."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dflop.parallelism import Plan
from dflop.pipeline import Instruction, Program
from dflop.pipeline.routes import Route, Routes, make_routes
from dflop.pipeline.run import Links
from dflop.runtime.local_device import local_device
from dflop.training.tied_embedding import Ends

__all__ = ["Topology", "join_world", "place_in_world"]

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One rank's view of the world.

    `instructions` are this rank's, over the nodes that it carries. `replicas` joins, for each of these nodes, the
    ranks that hold the same stage (the stage's dp group). `tied` joins the two ends of the LLM's pipeline, for those
    nodes that are one of them.
    """

    rank: int
    world_size: int
    program: Program
    instructions: tuple[Instruction, ...]
    device: torch.device
    store: dist.Store
    replicas: Mapping[int, dist.ProcessGroup]
    tied: Mapping[int, Ends]
    links: Links

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> tuple[int, ...]:
        """The indices of this rank's nodes."""
        return tuple(self.replicas)


def join_world(plan: Plan, program: Program, device_kind: str, dtype: torch.dtype) -> Topology:
    """Join the process group that torchrun's environment describes; every rank must call this."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    assert world_size == plan.world_size, f"{world_size} processes for a plan of {plan.world_size} ranks"
    device = local_device(device_kind)
    dist.init_process_group(
        "nccl" if device_kind == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
        device_id=device if device_kind == "cuda" else None,
    )
    return place_in_world(program, device, dtype, dist.PrefixStore("dflop", store))


def place_in_world(
    program: Program,
    device: torch.device,
    dtype: torch.dtype,
    store: dist.Store,
    *,
    groups_by_route: bool | None = None,
) -> Topology:
    """This process' place in a program, and its groups; every rank of the default process group must call this.

    `groups_by_route`: see `_message_groups`; None does so on GPUs.
    """
    # The one place that assumes a rank a worker (no tensor parallelism): a rank does what its worker does, and each
    # node is on one rank.
    assert all(worker.num_ranks == 1 for worker in program.workers), "a worker of several ranks cannot be trained"
    carried = [node for worker in program.workers for node in worker.nodes]
    assert len(carried) == len(program.nodes), "a node on several workers cannot be trained"
    rank, routes = dist.get_rank(), make_routes(program)
    links = Links(
        rank_of_worker=tuple(worker.first_rank for worker in program.workers),
        edges=program.edges,
        routes=routes,
        groups=_message_groups(program, routes, device.type == "cuda" if groups_by_route is None else groups_by_route),
        device=device,
        dtype=dtype,
    )
    own = links.rank_of_worker.index(rank)
    replicas, tied = _replica_groups(program), _tied_ends(program)
    return Topology(
        rank=rank,
        world_size=dist.get_world_size(),
        program=program,
        instructions=program.instructions[own],
        device=device,
        store=store,
        replicas={node: replicas[node] for node in program.workers[own].nodes},
        tied={node: ends for node, ends in tied.items() if node in program.workers[own].nodes},
        links=links,
    )


def _message_groups(program: Program, routes: Routes, by_route: bool) -> dict[Route, dist.ProcessGroup]:
    """The process group of each route. Every rank makes all groups, in one order.

    NCCL carries the messages of a communicator out one after the other, whoever they are for, and a large send waits
    for its receiver: were all routes in one, two ranks could each wait for what the other sends later. So each route
    has a communicator of its own there. Gloo delivers each message by itself, and one group for each channel does.
    """
    ranks = [worker.first_rank for worker in program.workers]
    taken = sorted({route for route in (*routes.forward, *routes.backward) if route})
    if by_route:
        return {
            route: dist.new_group([ranks[route.sender], ranks[route.receiver]], timeout=_TIMEOUT) for route in taken
        }
    channels = [dist.new_group(timeout=_TIMEOUT) for _ in range(routes.num_channels)]
    return {route: channels[route.channel] for route in taken}


def _replica_groups(program: Program) -> list[dist.ProcessGroup]:
    """The group of each node's stage; stages on the same ranks share one. Every rank makes all groups, in one order."""
    rank_of_node = _rank_of_node(program)
    ranks_of_stage: dict[tuple[str, int], list[int]] = {}
    for index, node in enumerate(program.nodes):
        ranks_of_stage.setdefault((node.module, node.pp_stage), []).append(rank_of_node[index])
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in map(tuple, ranks_of_stage.values()):
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), timeout=_TIMEOUT)
    return [groups[tuple(ranks_of_stage[node.module, node.pp_stage])] for node in program.nodes]


def _tied_ends(program: Program) -> dict[int, Ends]:
    """The two ends of each replica of the LLM, by node; none where one rank is both. Every rank makes all groups."""
    rank_of_node = _rank_of_node(program)
    place = {(node.pp_stage, node.dp_rank): index for index, node in enumerate(program.nodes) if node.module == "llm"}
    last_stage = max(stage for stage, _ in place)
    tied: dict[int, Ends] = {}
    for replica in sorted(replica for stage, replica in place if stage == 0):
        first, last = place[0, replica], place[last_stage, replica]
        owner, copy = rank_of_node[first], rank_of_node[last]
        if owner != copy:
            ends = Ends(owner, copy, dist.new_group([owner, copy], timeout=_TIMEOUT))
            tied |= {first: ends, last: ends}
    return tied


def _rank_of_node(program: Program) -> dict[int, int]:
    return {node: worker.first_rank for worker in program.workers for node in worker.nodes}
