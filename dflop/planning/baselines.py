"""Baselines: common ways to train, priced by the same simulator on the same batches as our plan.

- Megatron-style: the encoder in the LLM's first stage, one (tp, pp, dp) for both, even splits, 1F1B, batches as they
  are drawn; the fastest such plan that fits.
- FSDP-style: every device computes the whole model on its own samples. Parameters, gradients and moments are sharded
  over all devices, or inside each node where that is faster (`costs.sharded`). Batches are as they are drawn, grouped
  by length, or balanced as ours are; for each, the fastest such plan that fits.
- Today's layout, where `plan.today` gives one, with batches as they are drawn. Where it leaves them open, the encoder
  is in the LLM's first stage, the schedule is 1F1B and the optimiser state is sharded, as in common frameworks. Of the
  remaining plans, the fastest that fits.
- The published rule (DFLOP, arXiv 2603.25120): `(m + pp_v + pp_l - 1) * max(stage)` at mean shapes over disjoint grids,
  with balanced batches; the stages of all encoders count. Of the plans that fit, the one with the rule's least value.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import yaml

from dflop.config import Config, FixedGrid, FixedPlan, PlanConfig
from dflop.costs import CostModel, Loads, StageKind
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism import DISJOINT, MONOLITHIC, PLAIN_SCHEDULE, PLAIN_SHARDING, SHARDINGS, Plan
from dflop.parallelism.layout_key import LayoutKey
from dflop.planning.candidate import Candidate, PlanPricer
from dflop.planning.grouped_batches import GroupedBatches
from dflop.planning.least_memory import LeastMemory
from dflop.planning.recompute import may_recompute
from dflop.planning.row_bounds import MARGIN
from dflop.planning.search import SearchResult, search_plans
from dflop.planning.space import enumerate_space, llm_layers, plan_of
from dflop.pricing import BYTES_PER_VALUE, loads_of
from dflop.runtime import UserError

__all__ = [
    "PIPELINES",
    "TODAY",
    "Baseline",
    "DoesNotFit",
    "plan_by_published_rule",
    "price_baselines",
    "read_baselines",
    "require_todays_layout",
    "search_todays_layout",
    "whole_on_every_device",
]


# Megatron-style plans.
PIPELINES = PlanConfig(placements=[MONOLITHIC.name], schedules=[PLAIN_SCHEDULE], shardings=[PLAIN_SHARDING])
TODAY = "today's layout, random batches (plan.today)"
# Where none of the plans that `plan.today` leaves open fits: for how many of them the needed memory is computed.
_MOST_NEEDS = 64
# How FSDP-style training groups its batches, in code and in words.
_GROUPINGS = (("random", "random"), ("by_length", "length-grouped"), ("balanced", "balanced"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """One way to train without our planner. Where no plan of the kind is possible, `plan` is None and `why_not` says
    why. `steps_s` are the steps of each batch."""

    name: str
    plan: Plan | None
    steps_s: tuple[float, ...]
    idle: float
    memory_bytes: float
    why_not: str = "nothing of the kind fits into memory"

    @property
    def step_s(self) -> float:
        return float(np.mean(self.steps_s)) if self.plan else np.inf

    def beside(self, best: Candidate) -> dict[str, object]:
        """The baseline's entry in `plan.yaml`, compared with the chosen plan.

        `over_batches` are the least and the largest ratio of step times over the batches.
        """
        if self.plan is None:
            return {"name": self.name, "why_not": self.why_not}
        ratios = np.divide(self.steps_s, best.steps_s)
        return {
            "name": self.name,
            "step_s": float(f"{self.step_s:.6g}"),
            "would_take": f"{self.step_s / best.step_s:.3f}x as long",
            "over_batches": [round(float(ratio), 4) for ratio in np.percentile(ratios, (0, 100))],
            "idle": round(self.idle, 4),
            "memory_bytes": round(self.memory_bytes),
            "plan": str(self.plan),
        }


def read_baselines(plan: Path) -> dict[str, str]:
    """The text of each baseline in a `plan.yaml`: how long it would take, or why it is not possible.

    A `plan.yaml` written by hand has no baselines.
    """
    said = yaml.safe_load(plan.read_text(encoding="utf-8")).get("baselines", [])
    return {own["name"]: own.get("would_take") or own["why_not"] for own in said}


def require_todays_layout(config: Config, spec: ModelSpec, costs: CostModel) -> None:
    """Raise `UserError` when no plan for the devices agrees with `plan.today`; whether one fits is not checked."""
    if config.plan.today:
        _todays_rows(config, spec, costs)


def _todays_rows(config: Config, spec: ModelSpec, costs: CostModel) -> tuple[PlanConfig, pl.DataFrame]:
    """The limits that `plan.today` sets, and the rows of the space within them."""
    today = config.plan.today
    within = replace(PIPELINES, fixed=replace(today, placement=today.placement or MONOLITHIC.name))
    return within, enumerate_space(config, spec, costs.layouts, {}, within, "plan.today")


def price_baselines(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> list[Baseline]:
    """All baselines, priced on the batches that plans are priced on. `plan.fixed` does not limit them.

    Raises:
        UserError: when no plan for the devices agrees with `plan.today`.
    """
    batches = GroupedBatches(config, spec, costs, samples)
    return [
        *([_todays_layout(config, spec, costs, samples)] if config.plan.today else []),
        _published_rule(config, spec, costs, batches),
        _megatron_style(config, spec, costs, samples),
        *(_fsdp_style(config, spec, costs, samples, *how) for how in _GROUPINGS),
    ]


class DoesNotFit(UserError):
    """No plan of a layout fits into memory; `needed_bytes` is what the smallest of these plans needs on a device."""

    def __init__(self, message: str, needed_bytes: float) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


def search_todays_layout(
    config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, *, compares: bool = False
) -> SearchResult:
    """The search among the plans that `plan.today` leaves open, with batches as they are drawn.

    `compares` is that of `search_plans`.

    Raises:
        DoesNotFit: when none of these plans fits into memory.
        UserError: when no plan for the devices agrees with `plan.today`.
    """
    within, rows = _todays_rows(config, spec, costs)
    try:
        return search_plans(
            config, spec, costs, samples, grouping="random", within=within, splits_evenly=True, compares=compares
        )
    except UserError:  # the space is not empty, so nothing in it fits
        plan, needed_bytes = _nearest(rows, config, spec, costs, GroupedBatches(config, spec, costs, samples))
        why_not = (
            f"does not fit: {plan} needs {needed_bytes / 2**30:.3g} GiB a device ({needed_bytes:,.0f} bytes) of "
            f"`cluster.memory_gib` = {config.cluster.memory_gib:.4g}"
        )
        raise DoesNotFit(why_not, needed_bytes) from None


def _todays_layout(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> Baseline:
    """The baseline of `plan.today`; where it does not fit, `why_not` gives the bytes that it needs."""
    try:
        found = search_todays_layout(config, spec, costs, samples)
    except DoesNotFit as error:
        return replace(_nothing(TODAY), memory_bytes=error.needed_bytes, why_not=str(error))
    return _as_baseline(TODAY, found.candidates[0])


def _nearest(
    rows: pl.DataFrame, config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches
) -> tuple[Plan, float]:
    """The plan of the rows that needs least memory, and its bytes; among many rows, those with most microbatches."""
    needs = []
    pinned = config.plan.today.checkpointing
    for row in (
        rows.sort("num_microbatches", descending=True, maintain_order=True).head(_MOST_NEEDS).iter_rows(named=True)
    ):
        plan = plan_of(row, {}, checkpointing=may_recompute(row["schedule"], pinned))
        needs.append((PlanPricer(plan, config, spec, costs, batches, "random").needed_bytes(), plan))
    needed_bytes, plan = min(needs, key=lambda need: need[0])
    return plan, needed_bytes


def _megatron_style(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> Baseline:
    name = "monolithic, random batches (Megatron-style)"
    try:
        found = search_plans(config, spec, costs, samples, grouping="random", within=PIPELINES, splits_evenly=True)
    except UserError:
        return _nothing(name)
    return _as_baseline(name, found.candidates[0])


def _published_rule(config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches) -> Baseline:
    name = "published rule at mean shapes, balanced batches"
    found = plan_by_published_rule(config, spec, costs, batches)
    return _as_baseline(name, found) if found else _nothing(name)


def plan_by_published_rule(
    config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches
) -> Candidate | None:
    """Of the plans that fit, the one with the rule's least value, priced on balanced batches; None where none fits."""
    within = PlanConfig(placements=[DISJOINT.name], schedules=[PLAIN_SCHEDULE], shardings=[PLAIN_SHARDING])
    try:
        rows = enumerate_space(config, spec, costs.layouts, {}, within)
    except UserError:
        return None
    recomputing = pl.DataFrame({"checkpointing": [False, True]})  # the rule recomputes all layers or none
    rows = rows.join(recomputing, how="cross", maintain_order="left_right")
    stage_s = np.max([_mean_stage_s(rows, spec, costs, batches, module.name) for module in spec.modules], axis=0)
    num_stages = sum(rows[f"{module.name}_pp"] for module in spec.modules)
    places = rows["num_microbatches"] + num_stages - 1
    budget = config.cluster.memory_gib * 2**30
    frozen, value_bytes = config.model.freeze, BYTES_PER_VALUE[config.train.precision]
    memory = LeastMemory(spec, costs, batches, {}, "balanced", frozen, value_bytes)
    for place in np.argsort(places.to_numpy() * stage_s, kind="stable"):
        row = rows.row(int(place), named=True)
        recomputes, layers = row["checkpointing"], llm_layers(row, {}, spec.module("llm").num_layers)
        of_llm = memory.of_llm(row, layers if recomputes else (0,) * len(layers))
        if memory.least_bytes(row, of_llm, recomputes=recomputes) > budget * MARGIN:
            continue  # quicker to know than what the plan needs
        plan = plan_of(row, {}, checkpointing=recomputes)
        pricer = PlanPricer(plan, config, spec, costs, batches, "balanced")
        if pricer.needed_bytes(np.nextafter(budget, np.inf)) <= budget:
            return pricer.candidate()
    return None


def _mean_stage_s(
    rows: pl.DataFrame, spec: ModelSpec, costs: CostModel, batches: GroupedBatches, module: str
) -> np.ndarray:
    """Forward plus backward seconds of one of a module's stages on the mean microbatch, [num_rows]."""
    each = [loads_of(module, shapes) for shapes in batches.shapes]
    loads = [np.mean([load.sum() for load in column]) for column in zip(*each, strict=True)]
    seconds = np.zeros(len(rows))
    keys = (*LayoutKey.columns(f"{module}_"), "checkpointing")
    for (*sizes, checkpointing), own in rows.with_row_index("place").group_by(*keys):
        buckets = (own[f"{module}_dp"] * own["num_microbatches"]).to_numpy()
        num_layers = spec.module(module).num_layers
        whole = StageKind.whole(
            module, LayoutKey(*sizes), num_layers, num_recomputed=num_layers if checkpointing else 0
        )
        both = costs.stage_time(whole, Loads(*(load / buckets for load in loads)))
        seconds[own["place"].to_numpy()] = (both[0] + both[1]) / own[f"{module}_pp"].to_numpy()
    return seconds


def whole_on_every_device(spec: ModelSpec) -> PlanConfig:
    """The limits of the search space for fully sharded data parallelism."""
    whole = {module.name: FixedGrid(tp=1, pp=1) for module in spec.modules}
    return PlanConfig(
        placements=[MONOLITHIC.name],
        schedules=[PLAIN_SCHEDULE],
        shardings=[own for own, sharding in SHARDINGS.items() if sharding.gathers],
        fixed=FixedPlan(modules=whole),
    )


def _fsdp_style(
    config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, grouping: str, batches: str
) -> Baseline:
    name = f"every device the whole model, {batches} batches (FSDP-style)"
    try:
        found = search_plans(config, spec, costs, samples, grouping=grouping, within=whole_on_every_device(spec))
    except UserError:
        return _nothing(name)
    return _as_baseline(name, found.candidates[0])


def _as_baseline(name: str, candidate: Candidate) -> Baseline:
    return Baseline(
        name=name,
        plan=candidate.plan,
        steps_s=candidate.steps_s,
        idle=candidate.idle,
        memory_bytes=max(candidate.memory_bytes.values()),
    )


def _nothing(name: str) -> Baseline:
    return Baseline(name=name, plan=None, steps_s=(), idle=np.nan, memory_bytes=np.nan)
