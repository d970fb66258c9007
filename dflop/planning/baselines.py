"""What others would run, priced by the same simulator on the same batches, so that every claim is a ratio of one run.

- Megatron-style: the encoder in the LLM's first stage, one (tp, pp, dp) for both, even splits, 1F1B, batches as they
  are drawn; the best such plan that fits.
- FSDP-style: every device computes the whole model on its own samples; parameters, gradients and moments are sharded
  over all of them. Layer by layer, parameters are gathered for each pass of each microbatch and gradients are summed
  into the shards, in half precision, hidden behind computing wherever they can be. All devices take part in every
  layer's transfers, so that each pass of a microbatch lasts as long as on the device that has most to compute.
  Sharding inside nodes alone is not among them.
- The published rule (DFLOP, arXiv 2603.25120): `(m + pp_v + pp_l - 1) * max(stage)` at mean shapes over disjoint grids,
  with balanced batches; of several encoders, the stages of all count. The plan of its least value is taken: what the
  rule itself asks for, whatever it accepts.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import yaml

from dflop.config import Config, PlanConfig
from dflop.costs import PARTS, CostModel, Loads, StageKind, resident_bytes
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism import DISJOINT, MONOLITHIC, PLAIN_SCHEDULE, Grid, Plan
from dflop.pipeline import StageTimes, has_backward
from dflop.planning.candidate import Candidate, PlanPricer
from dflop.planning.grouped_batches import GroupedBatches
from dflop.planning.search import search_plans
from dflop.planning.space import enumerate_space, plan_of
from dflop.pricing import loads_of
from dflop.runtime import UserError

__all__ = ["Baseline", "price_baselines", "read_baselines"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """One way to train without our planner; `plan` is None where nothing of the kind fits into memory."""

    name: str
    plan: Plan | None
    step_s: float
    idle: float
    memory_bytes: float

    def beside(self, step_s: float) -> dict[str, object]:
        """What `plan.yaml` says of it, beside a chosen plan whose step takes `step_s`."""
        if self.plan is None:
            return {"name": self.name, "why_not": "nothing of the kind fits into memory"}
        return {
            "name": self.name,
            "step_s": float(f"{self.step_s:.6g}"),
            "would_take": f"{self.step_s / step_s:.3f}x as long",
            "idle": round(self.idle, 4),
            "memory_bytes": round(self.memory_bytes),
            "plan": str(self.plan),
        }


def read_baselines(plan: Path) -> dict[str, str]:
    """What a `plan.yaml` says of each baseline: how long it would take, or why not; nothing in one written by hand."""
    said = yaml.safe_load(plan.read_text(encoding="utf-8")).get("baselines", [])
    return {own["name"]: own.get("would_take") or own["why_not"] for own in said}


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
    within = PlanConfig(placements=[MONOLITHIC.name], schedules=[PLAIN_SCHEDULE])
    try:
        found = search_plans(config, spec, costs, samples, grouping="random", within=within, splits_evenly=True)
    except UserError:
        return _nothing(name)
    return _as_baseline(name, found.candidates[0])


def _published_rule(config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches) -> Baseline:
    name = "published rule at mean shapes, balanced batches"
    within = PlanConfig(placements=[DISJOINT.name], schedules=[PLAIN_SCHEDULE])
    try:
        rows = enumerate_space(config, spec, costs.tp_sizes, {}, within)
    except UserError:
        return _nothing(name)
    stage_s = np.max([_mean_stage_s(rows, spec, costs, batches, module.name) for module in spec.modules], axis=0)
    num_stages = sum(rows[f"{module.name}_pp"] for module in spec.modules)
    places = rows["num_microbatches"] + num_stages - 1
    budget = config.cluster.memory_gib * 2**30
    for row in np.argsort(places.to_numpy() * stage_s, kind="stable"):
        pricer = PlanPricer(plan_of(rows.row(int(row), named=True), {}), config, spec, costs, batches, "balanced")
        needs = (max(pricer.memory_bytes(batch).values()) for batch in range(len(batches)))
        if pricer.alone_bytes() <= budget and all(needed <= budget for needed in needs):
            return _as_baseline(name, pricer.candidate())
    return _nothing(name)


def _mean_stage_s(
    rows: pl.DataFrame, spec: ModelSpec, costs: CostModel, batches: GroupedBatches, module: str
) -> np.ndarray:
    """Forward and backward of one of a module's stages on the mean microbatch, [num_rows]."""
    each = [loads_of(module, shapes) for shapes in batches.shapes]
    loads = [np.mean([load.sum() for load in column]) for column in zip(*each, strict=True)]
    seconds = np.zeros(len(rows))
    keys = (f"{module}_tp", "checkpointing")
    for (tp, checkpointing), own in rows.with_row_index("place").group_by(*keys):
        buckets = (own[f"{module}_dp"] * own["num_microbatches"]).to_numpy()
        whole = StageKind.whole(module, tp, spec.module(module).num_layers, checkpointing=checkpointing)
        both = costs.stage_time(whole, Loads(*(load / buckets for load in loads)))
        seconds[own["place"].to_numpy()] = (both[0] + both[1]) / own[f"{module}_pp"].to_numpy()
    return seconds


def _fsdp_style(config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches) -> Baseline:
    best = _nothing("every device the whole model, random batches (FSDP-style)")
    num_devices = config.cluster.num_devices
    grid = {"num_ranks": num_devices, "tp": 1, "pp": 1}
    moving_s = _moving_s(config, spec, costs)
    for checkpointing in (False, True):
        spared_bytes = _spared_by_sharding(config, spec, costs, checkpointing)
        for exponent in range((config.train.global_batch_size // num_devices).bit_length()):
            plan = Plan(
                placement=MONOLITHIC.name,
                grids=tuple(Grid(module=module.name, **grid) for module in spec.modules),
                num_microbatches=1 << exponent,  # powers of two are enough to see how many it takes
                checkpointing=checkpointing,
            )
            pricer = PlanPricer(plan, config, spec, costs, batches, "random")
            needs = (max(pricer.memory_bytes(batch).values()) for batch in range(len(batches)))
            held = max(pricer.alone_bytes(), *needs) - spared_bytes
            if held > config.cluster.memory_gib * 2**30:
                continue
            step_s, busy_s = np.mean([_in_lockstep(pricer.stage_times(at), moving_s) for at in range(len(batches))], 0)
            if step_s < best.step_s:
                idle = float(1 - busy_s / step_s)
                best = Baseline(name=best.name, plan=plan, step_s=float(step_s), idle=idle, memory_bytes=held)
    return best


def _in_lockstep(times: StageTimes, moving_s: np.ndarray) -> tuple[float, float]:
    """The step, and what the mean device computes in it; `moving_s` is of the passes as they are stacked here."""
    passes = np.stack([times.forward_s, times.backward_s])
    passes = passes.reshape(2, moving_s.shape[1], -1, passes.shape[-1])  # pass, module, device, microbatch
    slowest = np.maximum(passes.max(axis=2), moving_s[..., None])
    return float(slowest.sum()), float(passes.sum() / passes.shape[2])


def _moving_s(config: Config, spec: ModelSpec, costs: CostModel) -> np.ndarray:
    """Transfers of one microbatch at each device, [pass, module]: half-precision parameters for every pass, and
    gradients behind a backward one; a frozen encoder has none."""
    cluster = config.cluster
    gbps = cluster.inter_node_gbps if cluster.num_nodes > 1 else cluster.intra_node_gbps
    sizes = np.array(list(_parameter_bytes(spec, costs).values())) * (1 - 1 / cluster.num_devices) / 2
    names, frozen = [module.name for module in spec.modules], config.model.freeze
    trained = np.array([name not in frozen for name in names])
    passed_back = np.array([has_backward(name, frozen) for name in names])
    return np.stack([sizes, sizes * passed_back + sizes * trained]) / (gbps * 1e9 / 8)


def _spared_by_sharding(config: Config, spec: ModelSpec, costs: CostModel, checkpointing: bool) -> float:
    """Bytes of a device: parameters, gradients and what a microbatch keeps whatever its size (parameters in half
    precision) are not whole, but for the part at work and a layer on its way."""
    num_devices, frozen = config.cluster.num_devices, config.model.freeze
    sizes = _parameter_bytes(spec, costs)
    replicated = sum(resident_bytes(size, num_devices, is_frozen=name in frozen) for name, size in sizes.items())
    sharded = sum(size * (1 if name in frozen else 4) for name, size in sizes.items()) / num_devices
    of_part = {part: max(costs.parameter_bytes[name, 1, part] for name in sizes) for part in PARTS}
    at_work = (max(of_part.values()) + of_part["layer"]) / 2
    nothing = Loads(*np.zeros((4, 1)))
    trained = [module for module in spec.modules if module.name not in frozen]
    wholes = [StageKind.whole(module.name, 1, module.num_layers, checkpointing=checkpointing) for module in trained]
    copied = sum(costs.stage_memory(whole, nothing).activation_bytes.item() for whole in wholes)
    return (1 + costs.allocator_share) * (replicated + copied - sharded - at_work)


def _parameter_bytes(spec: ModelSpec, costs: CostModel) -> dict[str, float]:
    return {
        module.name: costs.stage_parameter_bytes(StageKind.whole(module.name, 1, module.num_layers))
        for module in spec.modules
    }


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
