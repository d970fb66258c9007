"""What others would run, priced by the same simulator on the same batches, so that every claim is a ratio of one run.

- Megatron-style: the encoder in the LLM's first stage, one (tp, pp, dp) for both, even splits, 1F1B, batches as they
  are drawn; the best such plan that fits.
- FSDP-style: every device computes the whole model on its own samples, parameters are sharded over all of them and
  gathered anew for each pass of each microbatch. Gathering is taken to hide behind computing wherever it can.
- The published rule (DFLOP, arXiv 2603.25120): `(m + pp_v + pp_l - 1) * max(stage)` at mean shapes over disjoint grids,
  with balanced batches. Its least value is taken, which is at least as good as any other way to accept a plan by it.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from dflop.config import Config, PlanConfig
from dflop.costs import CostModel, Loads
from dflop.data import SampleShapes
from dflop.errors import UserError
from dflop.models import ModelSpec
from dflop.pipeline import Grid, Plan
from dflop.planning.batches import GroupedBatches
from dflop.planning.price import Candidate, PlanPricer
from dflop.planning.search import search_plans
from dflop.planning.space import enumerate_space, plan_of
from dflop.scheduling import find_link, loads_of, only

__all__ = ["Baseline", "price_baselines"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """One way to train without our planner; `plan` is None where nothing of the kind fits into memory."""

    name: str
    plan: Plan | None
    step_s: float
    idle: float
    memory_bytes: float


def price_baselines(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> list[Baseline]:
    """All of them, on the batches that plans are priced on; `plan.fixed` does not bind them."""
    batches = GroupedBatches(config, spec, costs, samples)
    return [
        _published_rule(config, spec, costs, batches),
        _megatron_style(config, spec, costs, samples),
        _fsdp_style(config, spec, costs, batches),
    ]


def _megatron_style(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> Baseline:
    name = "monolithic, random batches (Megatron-style)"
    within = PlanConfig(placements=["monolithic"], schedules=["1f1b"])
    try:
        found = search_plans(config, spec, costs, samples, grouping="random", within=within, splits_evenly=True)
    except UserError:
        return _nothing(name)
    return _as_baseline(name, found.candidates[0])


def _published_rule(config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches) -> Baseline:
    name = "published rule at mean shapes, balanced batches"
    within = PlanConfig(placements=["disjoint"], schedules=["1f1b"])
    try:
        rows = enumerate_space(config, spec, costs.tp_sizes, {}, within)
    except UserError:
        return _nothing(name)
    stage_s = np.maximum(
        _mean_stage_s(rows, spec, costs, batches, "vision"), _mean_stage_s(rows, spec, costs, batches, "llm")
    )
    places = rows["num_microbatches"] + rows["vision_pp"] + rows["llm_pp"] - 1
    budget = config.cluster.memory_gib * 2**30
    for row in np.argsort(places.to_numpy() * stage_s, kind="stable"):
        pricer = PlanPricer(plan_of(rows.row(int(row), named=True), {}), config, spec, costs, batches, "balanced")
        if all(max(pricer.memory_bytes(batch).values()) <= budget for batch in range(len(batches))):
            return _as_baseline(name, pricer.candidate(len(batches)))
    return _nothing(name)


def _mean_stage_s(
    rows: pl.DataFrame, spec: ModelSpec, costs: CostModel, batches: GroupedBatches, module: str
) -> np.ndarray:
    """Forward and backward of one of a module's stages on the mean microbatch, [num_rows]."""
    each = [only(module, loads_of(shapes)) for shapes in batches.shapes]
    loads = [np.mean([load.sum() for load in column]) for column in zip(*each, strict=True)]
    seconds = np.zeros(len(rows))
    keys = (f"{module}_tp", "checkpointing")
    for (tp, checkpointing), own in rows.with_row_index("place").group_by(*keys):
        buckets = (own[f"{module}_dp"] * own["num_microbatches"]).to_numpy()
        both = costs.stage_time(
            module,
            tp,
            spec.module(module).num_layers,
            Loads(*(load / buckets for load in loads)),
            is_first=True,
            is_last=True,
            checkpointing=checkpointing,
        )
        seconds[own["place"].to_numpy()] = (both[0] + both[1]) / own[f"{module}_pp"].to_numpy()
    return seconds


def _fsdp_style(config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches) -> Baseline:
    name = "every device the whole model, random batches (FSDP-style)"
    num_devices, cluster = config.cluster.num_devices, config.cluster
    ends = {"is_first": True, "is_last": True}
    sizes = {
        module.name: costs.stage_parameter_bytes(module.name, 1, module.num_layers, **ends) for module in spec.modules
    }
    trained = sum(size for module, size in sizes.items() if module not in config.model.freeze)
    # Gradients and two moments beside the parameters, of what is trained.
    resident = sum(sizes.values()) + 3 * trained
    # Half-precision parameters come for every pass; a frozen encoder has no backward.
    without_backward = set(config.model.freeze) - {"llm"}
    gathered = sum(size / 2 * (1 if module in without_backward else 2) for module, size in sizes.items())
    link = find_link(costs.links, cluster, "all_reduce", cluster.num_nodes == 1, num_devices)
    # The plan's own gradient sync is an all-reduce at its end; here it is part of what moves.
    sync_s = sum(link.seconds(size) for module, size in sizes.items() if module not in config.model.freeze)
    away = 1 - 1 / num_devices
    gbps = cluster.inter_node_gbps if cluster.num_nodes > 1 else cluster.intra_node_gbps
    best = _nothing(name)
    for checkpointing in (False, True):
        for count in range(1, config.train.global_batch_size // num_devices + 1):
            if count & (count - 1):
                continue  # powers of two are enough to see how many it takes
            grid = {"num_ranks": num_devices, "tp": 1, "pp": 1}
            plan = Plan(
                placement="monolithic",
                grids=(Grid(module="vision", **grid), Grid(module="llm", **grid)),
                num_microbatches=count,
                checkpointing=checkpointing,
            )
            own = PlanPricer(plan, config, spec, costs, batches, "random").candidate(len(batches))
            held = max(own.memory_bytes.values()) - (1 + costs.allocator_share) * resident * away
            if held > cluster.memory_gib * 2**30:
                continue
            # Full-precision gradients once a step.
            moving_s = (count * gathered + trained) * away / (gbps * 1e9 / 8)
            step_s = max(own.step_s - sync_s, moving_s)
            if step_s < best.step_s:
                idle = 1 - ((1 - own.idle) * own.step_s - sync_s) / step_s
                best = Baseline(name=name, plan=plan, step_s=step_s, idle=idle, memory_bytes=held)
    return best


def _as_baseline(name: str, candidate: Candidate) -> Baseline:
    return Baseline(
        name=name,
        plan=candidate.plan,
        step_s=candidate.step_s,
        idle=candidate.idle,
        memory_bytes=max(candidate.memory_bytes.values()),
    )


def _nothing(name: str) -> Baseline:
    return Baseline(name=name, plan=None, step_s=np.inf, idle=np.nan, memory_bytes=np.nan)
