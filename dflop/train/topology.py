"""The nodes of the plan that this rank carries, and the process groups that they need.

A worker is a number of consecutive ranks that act together (`step.nodes`): each of them carries out the worker's
instructions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dflop.base.local_device import local_device
from dflop.base.rendezvous import join_ranks
from dflop.models.tensor_group import TensorGroup
from dflop.plan import Plan
from dflop.step import Instruction, Program
from dflop.step.nodes import worker_of
from dflop.step.run import Links
from dflop.train.groups import GROUP_TIMEOUT, GroupMaker, RankGroups, rank_groups, ranks_of_nodes
from dflop.train.tied_embedding import Ends
from dflop.train.wires import make_links

__all__ = ["Sharers", "Topology", "join_group", "join_world", "place_in_world"]


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
    - `samples`: the replicas that may compute a sample together, only where there are several.
    - `tied`: the two ends of the LLM's pipeline, only for the nodes at these ends, and where they have a group.
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
    samples: Mapping[int, dist.ProcessGroup]
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


def join_world(plan: Plan, program: Program, device_kind: str, dtype: torch.dtype, *, is_tied: bool = True) -> Topology:
    """Join the process group that torchrun's environment describes, and find this rank's place in the program
    (`place_in_world`); every rank must call this."""
    device, store = join_group(device_kind)
    assert dist.get_world_size() == plan.world_size, f"{dist.get_world_size()} processes for {plan.world_size} ranks"
    return place_in_world(program, device, dtype, store, is_tied=is_tied)


def join_group(device_kind: str) -> tuple[torch.device, dist.Store]:
    """Join the process group that torchrun's environment describes. Returns this rank's device, and the ranks'
    store."""
    device = local_device(device_kind)
    if device_kind == "cuda":
        return device, join_ranks("nccl", timeout=GROUP_TIMEOUT, device_id=device)
    return device, join_ranks("gloo", timeout=GROUP_TIMEOUT)


def place_in_world(
    program: Program,
    device: torch.device,
    dtype: torch.dtype,
    store: dist.Store,
    *,
    is_tied: bool = True,
) -> Topology:
    """This rank's place in a program, with its groups; every rank of the default process group must call this. Where
    the LLM's head is not tied to its embedding (`is_tied`), the ends of its pipeline need no group."""
    rank = dist.get_rank()
    worker = worker_of(program.workers, rank)
    links = make_links(program, worker, device, dtype, GROUP_TIMEOUT)
    nodes, ranks = program.workers[worker].nodes, ranks_of_nodes(program)
    maker = GroupMaker(device)
    groups = {purpose: (of_all, maker.own(of_all)) for purpose, of_all in rank_groups(program, is_tied=is_tied).items()}
    module_of = {node: program.nodes[node].module for node in nodes}
    return Topology(
        rank=rank,
        world_size=dist.get_world_size(),
        program=program,
        instructions=program.instructions[worker],
        device=device,
        store=store,
        tensor={
            node: TensorGroup(ranks[node], ranks[node].index(rank), _group(groups, "tensor", module_of[node]))
            for node in nodes
        },
        replicas={node: _group(groups, "replicas", module_of[node]) for node in nodes},
        sharers={
            node: _sharers(groups, module_of[node], program.num_shards[module_of[node]], rank, device.type)
            for node in nodes
            if program.num_shards[module_of[node]] > 1
        },
        samples={node: _group(groups, "samples", module_of[node]) for node in nodes if program.cp[module_of[node]] > 1},
        tied=_tied_ends(groups, program, nodes, rank),
        links=links,
    )


_Groups = Mapping[tuple[str, str], tuple[RankGroups, dist.ProcessGroup | None]]


def _group(groups: _Groups, purpose: str, module: str) -> dist.ProcessGroup | None:
    """This rank's group; None where there is none of this kind."""
    return groups[purpose, module][1] if (purpose, module) in groups else None


def _sharers(groups: _Groups, module: str, num_shards: int, rank: int, device: str) -> Sharers:
    """The replicas that shard the parameters of this rank's node of the module."""
    replicas, _ = groups["replicas", module]
    alike = next(ranks for ranks in replicas if rank in ranks)
    rows = tuple(alike[first : first + num_shards] for first in range(0, len(alike), num_shards))
    row, column = _group(groups, "shards", module), _group(groups, "copies", module)
    if column is None:
        return Sharers(rows, DeviceMesh.from_group(row, device))
    names = ("copies", "shards")
    return Sharers(rows, DeviceMesh.from_group([column, row], device, mesh=torch.tensor(rows), mesh_dim_names=names))


def _tied_ends(groups: _Groups, program: Program, nodes: Sequence[int], rank: int) -> dict[int, Ends]:
    """The two ends of the pipeline of this rank's LLM replica, for its nodes at these ends; none if both are on the
    same ranks."""
    pairs, group = groups.get(("ends", "llm"), ((), None))
    if group is None:
        return {}
    ends = Ends(*next(pair for pair in pairs if rank in pair), group)
    last = max(node.pp_stage for node in program.nodes if node.module == "llm")
    return {
        node: ends
        for node in nodes
        if program.nodes[node].module == "llm" and program.nodes[node].pp_stage == (0 if rank == ends.owner else last)
    }
