"""The nodes of the plan that this rank carries, and the process groups that they need.

A worker is a number of consecutive ranks that act together (`step.nodes`): each of them carries out the worker's
instructions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dflop.base.local_device import local_device
from dflop.models.tensor_group import TensorGroup
from dflop.plan import Plan
from dflop.step import Instruction, Program
from dflop.step.run import Links
from dflop.train.tied_embedding import Ends
from dflop.train.wires import make_links

__all__ = ["Sharers", "Topology", "join_group", "join_world", "place_in_world"]

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Sharers:
    """The replicas that shard a stage's parameters. Each row of `ranks` has one copy of the parameters. The last axis
    of `mesh` is this rank's row; if there are several copies, the first axis is the ranks that hold the same rows of
    each.

    If several tensor-parallel ranks carry a replica, `ranks` are those with this rank's place among them: the ranks of
    each place shard their own part of the stage."""

    ranks: tuple[tuple[int, ...], ...]
    mesh: DeviceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One rank's view of the world.

    `instructions` are this rank's, over the nodes that it carries. The mappings have an entry for each of these nodes:

    - `tensor`: the ranks that carry the node together, including this one (its tp group).
    - `replicas`: the group of the ranks that hold the same part of the same stage (its dp group).
    - `sharers`: the node's replicas, only if they shard its parameters.
    - `tied`: the two ends of the LLM's pipeline, only for the nodes at these ends.
    """

    rank: int
    world_size: int
    program: Program
    instructions: tuple[Instruction, ...]
    device: torch.device
    store: dist.Store
    tensor: Mapping[int, TensorGroup]
    replicas: Mapping[int, dist.ProcessGroup]
    sharers: Mapping[int, Sharers]
    tied: Mapping[int, Ends]
    links: Links

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> tuple[int, ...]:
        """The indices of this rank's nodes."""
        return tuple(self.replicas)

    @property
    def carried(self) -> str:
        """This rank's nodes in words."""
        nodes = (self.program.nodes[index] for index in self.nodes)
        return ", ".join(f"{node.module} stage {node.pp_stage} replica {node.dp_rank}" for node in nodes)


def join_world(plan: Plan, program: Program, device_kind: str, dtype: torch.dtype) -> Topology:
    """Join the process group that torchrun's environment describes, and find this rank's place in the program; every
    rank must call this."""
    device, store = join_group(device_kind)
    assert dist.get_world_size() == plan.world_size, f"{dist.get_world_size()} processes for {plan.world_size} ranks"
    return place_in_world(program, device, dtype, store)


def join_group(device_kind: str) -> tuple[torch.device, dist.Store]:
    """Join the process group that torchrun's environment describes. Returns this rank's device, and the group's
    store."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    device = local_device(device_kind)
    dist.init_process_group(
        "nccl" if device_kind == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
        device_id=device if device_kind == "cuda" else None,
    )
    return device, dist.PrefixStore("dflop", store)


def place_in_world(
    program: Program,
    device: torch.device,
    dtype: torch.dtype,
    store: dist.Store,
    *,
    groups_by_route: bool | None = None,
) -> Topology:
    """This rank's place in a program, with its groups; every rank of the default process group must call this.

    For `groups_by_route` see `make_links`; None means True on GPUs and False elsewhere.
    """
    rank = dist.get_rank()
    own = next(
        index
        for index, worker in enumerate(program.workers)
        if worker.first_rank <= rank < worker.first_rank + worker.num_ranks
    )
    by_route = device.type == "cuda" if groups_by_route is None else groups_by_route
    links = make_links(program, own, device, dtype, _TIMEOUT, groups_by_route=by_route)
    nodes, ranks = program.workers[own].nodes, _ranks_of_nodes(program)
    place = {node: ranks[node].index(rank) for node in nodes}
    tensor, replicas, tied = _tensor_groups(ranks), _replica_groups(program, ranks), _tied_ends(program, ranks)
    sharers = _sharers(program, ranks, rank, device.type)
    return Topology(
        rank=rank,
        world_size=dist.get_world_size(),
        program=program,
        instructions=program.instructions[own],
        device=device,
        store=store,
        tensor={node: TensorGroup(ranks[node], place[node], tensor[node]) for node in nodes},
        replicas={node: replicas[node][place[node]] for node in nodes},
        sharers=sharers,
        tied={node: tied[node][place[node]] for node in nodes if node in tied},
        links=links,
    )


class _Groups:
    """Process groups for one purpose, by their ranks; each is made once. Every rank makes all groups, in the same
    order."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        if tuple(ranks) not in self._made:
            self._made[tuple(ranks)] = dist.new_group(list(ranks), timeout=_TIMEOUT)
        return self._made[tuple(ranks)]


def _ranks_of_nodes(program: Program) -> list[tuple[int, ...]]:
    """For each node, the ranks that carry it together, in order: its tp group."""
    ranks: list[list[int]] = [[] for _ in program.nodes]
    for worker in program.workers:
        for node in worker.nodes:
            ranks[node] += range(worker.first_rank, worker.first_rank + worker.num_ranks)
    return [tuple(own) for own in ranks]


def _tensor_groups(ranks: Sequence[tuple[int, ...]]) -> list[dist.ProcessGroup | None]:
    """For each node, the process group of its ranks; None for a single rank."""
    groups = _Groups()
    return [groups.of(own) if len(own) > 1 else None for own in ranks]


def _replica_groups(program: Program, ranks: Sequence[tuple[int, ...]]) -> list[list[dist.ProcessGroup]]:
    """For each node, and each of its ranks, the group of the ranks that hold the same part of the stage."""
    groups = _Groups()
    nodes_of_stage: dict[tuple[str, int], list[int]] = {}
    for index, node in enumerate(program.nodes):
        nodes_of_stage.setdefault((node.module, node.pp_stage), []).append(index)
    found: list[list[dist.ProcessGroup]] = [[] for _ in program.nodes]
    for nodes in nodes_of_stage.values():
        made = [groups.of(alike) for alike in zip(*(ranks[node] for node in nodes), strict=True)]
        for node in nodes:
            found[node] = made
    return found


def _sharers(program: Program, ranks: Sequence[tuple[int, ...]], rank: int, device: str) -> dict[int, Sharers]:
    """For each of this rank's nodes whose parameters replicas shard, these replicas."""
    groups, found = _Groups(), {}
    for module, num_shards in program.num_shards.items():
        nodes = [index for index, node in enumerate(program.nodes) if node.module == module]
        if num_shards == 1:
            continue
        for own in zip(*(ranks[node] for node in nodes), strict=True):  # for each tensor-parallel place
            rows = tuple(own[first : first + num_shards] for first in range(0, len(own), num_shards))
            shared = [groups.of(row) for row in rows]
            copies = [groups.of(column) for column in zip(*rows, strict=True)] if len(rows) > 1 else [None] * num_shards
            for replica, node in enumerate(nodes):
                row, column = divmod(replica, num_shards)
                if rank == own[replica]:
                    found[node] = Sharers(rows, _mesh_of(rows, shared[row], copies[column], device))
    return found


def _mesh_of(
    rows: tuple[tuple[int, ...], ...], row: dist.ProcessGroup, column: dist.ProcessGroup | None, device: str
) -> DeviceMesh:
    if column is None:
        return DeviceMesh.from_group(row, device)
    names = ("copies", "shards")
    return DeviceMesh.from_group([column, row], device, mesh=torch.tensor(rows), mesh_dim_names=names)


def _tied_ends(program: Program, ranks: Sequence[tuple[int, ...]]) -> dict[int, list[Ends]]:
    """The two ends of each LLM replica's pipeline, by node and for each of its ranks; none if both are on the same
    ranks."""
    groups = _Groups()
    place = {(node.pp_stage, node.dp_rank): index for index, node in enumerate(program.nodes) if node.module == "llm"}
    last_stage = max(stage for stage, _ in place)
    tied: dict[int, list[Ends]] = {}
    for replica in sorted(replica for stage, replica in place if stage == 0):
        first, last = place[0, replica], place[last_stage, replica]
        if ranks[first] != ranks[last]:
            ends = [Ends(*pair, groups.of(pair)) for pair in zip(ranks[first], ranks[last], strict=True)]
            tied |= {first: ends, last: ends}
    return tied
