"""Loading by CPU cores: how many loader processes a rank needs for a plan, and when the cores are too few.

A rank loads for each of its pipeline stages that reads records: an encoder's first stage reads and decodes media, the
LLM's first and last stage read text. Of the tensor-parallel ranks of a stage, the first decodes media for all of them,
while each reads text.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from dflop.base import UserError
from dflop.config import ClusterConfig
from dflop.loading import LoadingTimes
from dflop.plan import Plan
from dflop.step import nodes_of, workers_of

__all__ = ["LoadingNeed", "loading_need", "loading_note", "planned_loaders"]

# Users are warned where loading makes a step longer by more than this factor.
_WORTH_A_WORD = 1.03
# Loaders finish unevenly, and ranks should not wait for them: processes are planned for this many times the mean time.
_ROOM = 1.2


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingNeed:
    """The loader processes and core time for one step.

    `rank_s` are the seconds that one process would take for the rank that loads most. `num_processes` is the number of
    processes with which a rank's loading is no slower than its step, as far as there are cores for them. `step_s` is
    the expected step time with these loaders on `num_cores` cores a node. It is longer than the plan's own where ranks
    and loaders together need more core time than there is, or more processes than cores.
    """

    rank_s: float
    num_processes: int
    num_cores: int
    step_s: float

    def to_dict(self) -> dict[str, float | int]:
        """The section `loading` of plan.yaml."""
        return {
            "rank_s": float(f"{self.rank_s:.4g}"),
            "processes": self.num_processes,
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
    rank_s, node_core_s = _of_ranks(plan, times, cluster, global_batch_size)
    ranks_here = min(plan.world_size, cluster.devices_per_node)
    cores = times.num_cores
    num_processes = min(max(1, cores // ranks_here), max(1, math.ceil(_ROOM * rank_s / step_s)))
    # On CPUs the ranks compute on the same cores. Beside a GPU a rank keeps one core busy.
    computing_s = step_s * (cores * (1.0 - idle) if cluster.device == "cpu" else ranks_here)
    return LoadingNeed(
        rank_s=rank_s,
        num_processes=num_processes,
        num_cores=cores,
        step_s=max(step_s, rank_s / num_processes, (computing_s + node_core_s) / cores),
    )


def loading_note(need: LoadingNeed, step_s: float) -> str:
    """A note for users on a plan's loading, with a warning and advice where loading is the bottleneck."""
    note = (
        f"loading: {need.rank_s:.3g} s of one process for the rank that loads most, beside a step of {step_s:.3g} s; "
        f"{need.num_processes} loader process{'es' if need.num_processes > 1 else ''} a rank"
    )
    if need.step_s <= _WORTH_A_WORD * step_s:
        return note
    return (
        f"{note}. Loading bounds this run: on {need.num_cores} cores a node the step will take about "
        f"{need.step_s:.3g} s. More cores, smaller media (scaled once, beforehand) or fewer frames "
        "(`data.video`) shorten it"
    )


def planned_loaders(plan_path: Path) -> int:
    """The number of loader processes a rank in plan.yaml; 1 where loading was not measured.

    Raises:
        UserError: when the number in plan.yaml is not a whole number of at least 1.
    """
    loading = (yaml.safe_load(plan_path.read_text(encoding="utf-8")) or {}).get("loading") or {}
    number = loading.get("processes", 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UserError(f"{plan_path}: `loading.processes` is {number!r}; it must be a whole number of at least 1")
    return number


def _of_ranks(plan: Plan, times: LoadingTimes, cluster: ClusterConfig, global_batch_size: int) -> tuple[float, float]:
    """For one step, the seconds of loading of the rank that loads most, and the core seconds of the machine that loads
    most."""
    nodes = nodes_of(plan)
    of_batch = {grid.module: times.of_batch(grid.module, global_batch_size) for grid in plan.grids}
    of_rank = np.zeros((plan.world_size, 2))
    served = set()
    for worker in workers_of(plan):
        ranks = slice(worker.first_rank, worker.first_rank + worker.num_ranks)
        for index in worker.nodes:
            node = nodes[index]
            own = np.array(of_batch[node.module]) / plan.grid(node.module).dp
            if node.module == "llm" and node.pp_stage in (0, plan.num_stages("llm") - 1):
                of_rank[ranks] += own
            elif node.module != "llm" and node.pp_stage == 0 and index not in served:
                served.add(index)
                of_rank[worker.first_rank] += own
    machine = np.arange(plan.world_size) // cluster.devices_per_node
    return float(of_rank[:, 0].max()), float(np.bincount(machine, weights=of_rank[:, 1]).max())
