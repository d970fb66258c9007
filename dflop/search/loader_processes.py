"""Loading by CPU cores: how many loader processes each rank gets for a plan, and when the cores are too few.

A rank loads for each of its pipeline stages that reads records: an encoder's first stage reads and decodes media, the
LLM's first and last stage read text. Of the tensor-parallel ranks of a stage, the first decodes media for all of them,
while each reads text. The ranks of a node share its cores: training starts the processes that are decided here.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop.base import UserError
from dflop.config import ClusterConfig
from dflop.loading import LoadingTimes
from dflop.plan import Plan, read_plan_file
from dflop.step import nodes_of, workers_of

__all__ = ["LoadingNeed", "loading_need", "loading_note", "planned_loaders"]

# Users are warned where loading makes a step longer by more than this factor.
_WORTH_A_WORD = 1.03
# Loaders finish unevenly, and ranks should not wait for them: processes are planned for this many times the mean time.
_ROOM = 1.2


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingNeed:
    """The loader processes and core time for one step.

    `rank_s` are the seconds that one process would take for the rank that loads most. `processes` has each rank's
    number of processes: with these its loading is no slower than its step, as far as there are cores for them.
    `step_s` is the expected step time with these loaders on `num_cores` cores a node. It is longer than the plan's own
    where ranks and loaders together need more core time than there is, or more processes than cores.
    """

    rank_s: float
    processes: tuple[int, ...]
    num_cores: int
    step_s: float

    def to_dict(self) -> dict[str, float | int | str]:
        """The section `loading` of plan.yaml."""
        return {
            "rank_s": float(f"{self.rank_s:.4g}"),
            "processes": max(self.processes),
            "processes_of_ranks": " ".join(map(str, self.processes)),
            "cores": self.num_cores,
            "step_s": float(f"{self.step_s:.6g}"),
        }


def loading_need(
    plan: Plan,
    times: LoadingTimes,
    cluster: ClusterConfig,
    *,
    global_batch_size: int,
    step_s: float,
    idle: float,
) -> LoadingNeed:
    """The need of a plan. Without loading, its step takes `step_s` seconds, of which the share `idle` is waiting."""
    rank_s, rank_core_s = _of_ranks(plan, times, global_batch_size)
    cores, per_node = times.num_cores, cluster.devices_per_node
    # On CPUs the ranks compute on the same cores. Beside a GPU a rank keeps one core busy.
    busy = 0 if cluster.device == "cpu" else min(plan.world_size, per_node)
    computing_s = step_s * (busy or cores * (1.0 - idle))
    nodes = [slice(first, first + per_node) for first in range(0, plan.world_size, per_node)]
    processes = np.concatenate([_divided(cores - busy, rank_s[node], step_s) for node in nodes])
    return LoadingNeed(
        rank_s=float(rank_s.max()),
        processes=tuple(processes.tolist()),
        num_cores=cores,
        step_s=max(
            step_s,
            float((rank_s / np.maximum(processes, 1)).max()),
            *((computing_s + float(rank_core_s[node].sum())) / cores for node in nodes),
        ),
    )


def loading_note(need: LoadingNeed, step_s: float) -> str:
    """A note for users on a plan's loading, with a warning and advice where loading is the bottleneck."""
    most = max(need.processes)
    note = (
        f"loading: {need.rank_s:.3g} s of one process for the rank that loads most, beside a step of {step_s:.3g} s; "
        f"{most} loader process{'es' if most > 1 else ''} there, {sum(need.processes)} in all"
    )
    if need.step_s <= _WORTH_A_WORD * step_s:
        return note
    return (
        f"{note}. Loading bounds this run: on {need.num_cores} cores a node the step will take about "
        f"{need.step_s:.3g} s. More cores, smaller media (scaled once, beforehand) or fewer frames "
        "(`data.video`) shorten it"
    )


def planned_loaders(plan_path: Path, world_size: int) -> list[int]:
    """Each rank's number of loader processes in plan.yaml; 1 where loading was not measured.

    It is at least 1, because a rank with nothing to load starts none.

    Raises:
        UserError: when plan.yaml does not have a whole number for each rank.
    """
    loading = read_plan_file(plan_path, "loading").get("loading") or {}
    said = str(loading.get("processes_of_ranks", " ".join([str(loading.get("processes", 1))] * world_size)))
    numbers = said.split()
    if len(numbers) != world_size or not all(number.isdecimal() for number in numbers):
        raise UserError(
            f"{plan_path}: the loader processes of ranks (`loading.processes_of_ranks`) are {said!r}; there must be "
            f"a whole number for each of the {world_size} ranks"
        )
    return [max(1, int(number)) for number in numbers]


def _divided(cores: int, rank_s: np.ndarray, step_s: float) -> np.ndarray:
    """The processes of a node's ranks, [num_ranks], whose loading takes one process `rank_s` [num_ranks].

    Each rank that loads has one. Further ones go, while there are cores, to the rank whose loading takes longest, until
    no loading takes longer than a step.
    """
    processes = (rank_s > 0).astype(int)
    while processes.sum() < cores:
        share_s = rank_s / np.maximum(processes, 1)
        if _ROOM * share_s.max() <= step_s:
            break
        processes[share_s.argmax()] += 1
    return processes


def _of_ranks(plan: Plan, times: LoadingTimes, global_batch_size: int) -> np.ndarray:
    """For one step, the seconds of loading and of its cores for each rank, [2, num_ranks]."""
    nodes = nodes_of(plan)
    of_batch = {grid.module: times.of_batch(grid.module, global_batch_size) for grid in plan.grids}
    of_rank = np.zeros((plan.world_size, 2))
    served = set()
    for worker in workers_of(plan):
        ranks = slice(worker.first_rank, worker.first_rank + worker.num_ranks)
        for index in worker.nodes:
            node = nodes[index]
            of_replica = np.array(of_batch[node.module]) / plan.grid(node.module).dp
            if node.module == "llm" and node.pp_stage in (0, plan.num_stages("llm") - 1):
                of_rank[ranks] += of_replica
            elif node.module != "llm" and node.pp_stage == 0 and index not in served:
                served.add(index)
                of_rank[worker.first_rank] += of_replica
    return of_rank.T
