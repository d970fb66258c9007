"""Process groups of a plan: which ranks form one, and how they are made.

A rank has a small number of them, whatever the number of ranks: one of all ranks for each channel of messages
(`wires`), and by module those of `rank_groups`. Groups for one purpose share no rank. With NCCL they are made by one
call, which splits the communicator of all ranks, so that starting takes as many calls as a rank has groups.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dflop.step import Program

__all__ = ["GROUP_TIMEOUT", "GroupMaker", "RankGroups", "rank_groups", "ranks_of_nodes"]

# Ranks wait for one that reads its weights from a slow disk, or compiles. `PeerWatch` ends a job that hangs earlier.
GROUP_TIMEOUT = timedelta(hours=1)

# Groups that share no rank.
RankGroups = tuple[tuple[int, ...], ...]


def ranks_of_nodes(program: Program) -> list[tuple[int, ...]]:
    """For each node, the ranks that carry it together, in order: its tp group."""
    ranks: list[list[int]] = [[] for _ in program.nodes]
    for worker in program.workers:
        for node in worker.nodes:
            ranks[node] += range(worker.first_rank, worker.first_rank + worker.num_ranks)
    return [tuple(of_node) for of_node in ranks]


def rank_groups(program: Program, *, is_tied: bool = True) -> dict[tuple[str, str], RankGroups]:
    """The groups of a program by purpose and module:

    - `tensor`: the ranks that carry a node together, where there are several.
    - `replicas`: the ranks that hold the same part of the same stage.
    - `shards`: the replicas that share one copy of a stage's parameters, where they do.
    - `samples`: the replicas of the LLM that may compute a sample together, where there are several.
    - `copies`: the replicas with the same share of the parameters, where there are several copies.
    - `ends`: the two ends of the LLM's pipeline in each replica, where they are on different ranks and the LLM's head
      is tied to its embedding (`is_tied`).
    """
    ranks, found = ranks_of_nodes(program), {}
    for module, num_shards in program.num_shards.items():
        of_stage: dict[int, list[tuple[int, ...]]] = {}
        for node, of_node in zip(program.nodes, ranks, strict=True):
            if node.module == module:
                of_stage.setdefault(node.pp_stage, []).append(of_node)
        replicas = [alike for nodes in of_stage.values() for alike in zip(*nodes, strict=True)]
        rows = [alike[first : first + num_shards] for alike in replicas for first in range(0, len(alike), num_shards)]
        columns = [alike[first::num_shards] for alike in replicas for first in range(num_shards)]
        found["tensor", module] = [of_node for nodes in of_stage.values() for of_node in nodes if len(of_node) > 1]
        found["replicas", module] = replicas
        found["shards", module] = rows if num_shards > 1 else []
        cp = program.cp[module]
        shared = [alike[first : first + cp] for alike in replicas for first in range(0, len(alike), cp)]
        found["samples", module] = shared if cp > 1 else []
        found["copies", module] = columns if 1 < num_shards < len(replicas[0]) else []
        if module == "llm" and is_tied:
            ends = zip(of_stage[0], of_stage[max(of_stage)], strict=True)
            found["ends", module] = [
                pair for first, last in ends if first != last for pair in zip(first, last, strict=True)
            ]
    # The chunks of an interleaved LLM's rank are on the same ranks.
    return {purpose: tuple(dict.fromkeys(groups)) for purpose, groups in found.items() if groups}


class GroupMaker:
    """Makes process groups. Every rank of the world must make the same, in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._splits, self._made = device.type == "cuda", {}

    def own(self, groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """This rank's group of some that share no rank; None where it is in none of them."""
        if (key := frozenset(groups)) not in self._made:
            self._made[key] = (self._split if self._splits else self._make)(groups)
        return self._made[key]

    def _split(self, groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
        return dist.split_group(split_ranks=[list(ranks) for ranks in groups], timeout=GROUP_TIMEOUT)

    def _make(self, groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
        made = {ranks: dist.new_group(list(ranks), timeout=GROUP_TIMEOUT) for ranks in groups}
        return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)
