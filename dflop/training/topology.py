"""Who is who: this rank's place in the plan, and the process groups that its place needs."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dflop.pipeline import Node, Plan, Program
from dflop.pipeline.run import Links
from dflop.runtime.local_device import local_device

__all__ = ["Topology", "join_world"]

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One rank's view. `replicas` joins the ranks that hold the same stage (the stage's dp group)."""

    rank: int
    world_size: int
    node_index: int
    node: Node
    device: torch.device
    store: dist.Store
    replicas: dist.ProcessGroup
    links: Links

    @property
    def is_main(self) -> bool:
        return self.rank == 0


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
    forward_group, backward_group = (dist.new_group(timeout=_TIMEOUT) for _ in range(2))
    # Of what can be trained today, every rank is a worker and carries one node.
    rank_of_node = tuple(plan.grid(node.module).first_rank(node.pp_stage, node.dp_rank) for node in program.nodes)
    own_index = rank_of_node.index(rank)
    replicas = None
    for grid in plan.grids:
        for stage in range(grid.pp):
            ranks = [grid.first_rank(stage, replica) for replica in range(grid.dp)]
            group = dist.new_group(ranks, timeout=_TIMEOUT)
            if rank in ranks:
                replicas = group
    return Topology(
        rank=rank,
        world_size=world_size,
        node_index=own_index,
        node=program.nodes[own_index],
        device=device,
        store=dist.PrefixStore("dflop", store),
        replicas=replicas,
        links=Links(
            rank_of_node=rank_of_node,
            edges=program.edges,
            forward_group=forward_group,
            backward_group=backward_group,
            device=device,
            dtype=dtype,
        ),
    )
