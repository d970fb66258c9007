"""The search: every plan priced by what its scheduled batches would take, the shortest one chosen.

The price is the mean step time over global batches drawn from the data and regrouped by `lpt`, not the
step time of a mean batch: the variance is the point.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import yaml

from dflop.config import Config, ScheduleConfig
from dflop.costs import CostModel
from dflop.data import SampleShapes
from dflop.errors import UserError
from dflop.models import ModelSpec
from dflop.pipeline import Plan
from dflop.planning.space import enumerate_plans
from dflop.scheduling import BatchScheduler, GlobalBatches, Pricer

__all__ = ["Candidate", "candidates_frame", "describe_choice", "search_plans"]

_FIRST_LOOK_BATCHES = 2
_FINALISTS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A priced plan; times are means over the batches it was priced on, memory is the highest of them."""

    plan: Plan
    num_batches: int
    step_s: float
    idle: float
    memory_bytes: dict[str, float]
    busy_s: dict[str, float]
    extrapolated: float
    bottleneck: str


def search_plans(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Candidate]:
    """All plans that fit in memory, best first. The first `_FINALISTS` are priced on all `search_batches`.

    Activation checkpointing costs time and saves memory: it is tried only where a plan does not fit without.

    Raises:
        UserError: when nothing fits, naming the nearest miss.
    """
    batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
    for module in spec.modules:
        costs.require(module.name, tp=1)
    budget_bytes = config.cluster.memory_gib * 2**30
    misses: list[tuple[float, str]] = []

    def price_if_it_fits(plan: Plan, num_batches: int) -> Candidate | None:
        progress(str(plan))
        try:
            candidate = _price(config, spec, costs, samples, batches, plan, num_batches)
        except UserError as error:
            misses.append((np.inf, str(error)))
            return None
        needed = max(candidate.memory_bytes.values())
        if needed > budget_bytes:
            misses.append((needed, f"{plan} needs {needed / 2**30:.3g} GiB a device"))
            return None
        return candidate

    fitting: list[Candidate] = []
    fits_without: set[str] = set()
    for plan in enumerate_plans(config, spec):
        layout = str(plan).removesuffix(", checkpointing")
        if layout not in fits_without and (candidate := price_if_it_fits(plan, _FIRST_LOOK_BATCHES)):
            fitting.append(candidate)
            fits_without.add(layout)
    fitting.sort(key=_rank_key)
    finalists: list[Candidate] = []
    num_looked_at = 0
    may_checkpoint = config.plan.fixed is None or config.plan.fixed.checkpointing is None
    for candidate in fitting:
        if len(finalists) == _FINALISTS:
            break
        num_looked_at += 1
        # More batches may hold a fuller one.
        found = price_if_it_fits(candidate.plan, config.plan.search_batches)
        if found is None and may_checkpoint and not candidate.plan.checkpointing:
            found = price_if_it_fits(replace(candidate.plan, checkpointing=True), config.plan.search_batches)
        if found:
            finalists.append(found)
    if not finalists:
        raise UserError(
            f"no plan fits into `cluster.memory_gib` = {config.cluster.memory_gib}; the nearest: {min(misses)[1]}. "
            "Raise the memory or the number of devices, or lower `train.global_batch_size` or `data.max_llm_tokens`"
        )
    return sorted(finalists, key=_rank_key) + fitting[num_looked_at:]


def candidates_frame(candidates: Sequence[Candidate]) -> pl.DataFrame:
    """The table `candidates.parquet`."""
    rows = []
    for rank, candidate in enumerate(candidates, start=1):
        plan = candidate.plan
        vision, llm = plan.grid("vision"), plan.grid("llm")
        rows.append(
            {
                "rank": rank,
                "placement": plan.placement,
                **{f"vision_{key}": getattr(vision, key) for key in ("tp", "pp", "dp")},
                **{f"llm_{key}": getattr(llm, key) for key in ("tp", "pp", "dp")},
                "num_microbatches": plan.num_microbatches,
                "checkpointing": plan.checkpointing,
                "schedule": plan.schedule,
                "step_s": candidate.step_s,
                "idle": candidate.idle,
                "vision_memory_bytes": candidate.memory_bytes["vision"],
                "llm_memory_bytes": candidate.memory_bytes["llm"],
                "bottleneck": candidate.bottleneck,
                "num_batches": candidate.num_batches,
                "extrapolated": candidate.extrapolated,
            }
        )
    return pl.DataFrame(rows)


def _rank_key(candidate: Candidate) -> tuple[float, float]:
    return candidate.step_s, max(candidate.memory_bytes.values())


def _price(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    batches: GlobalBatches,
    plan: Plan,
    num_batches: int,
) -> Candidate:
    pricer = Pricer(plan, costs, spec, config.cluster, frozen=config.model.freeze, precision=config.train.precision)
    scheduler = BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="lpt"), config.seed)
    priced = [scheduler.price(step) for step in range(num_batches)]
    busy_s = {
        grid.module: float(np.mean([_busiest(pricer, grid.module, entry.busy_s) for entry in priced]))
        for grid in plan.grids
    }
    step_s = float(np.mean([entry.step_s for entry in priced]))
    memory_bytes = {grid.module: max(entry.memory_bytes[grid.module] for entry in priced) for grid in plan.grids}
    return Candidate(
        plan=plan,
        num_batches=num_batches,
        step_s=step_s,
        idle=float(np.mean([entry.idle for entry in priced])),
        memory_bytes=memory_bytes,
        busy_s=busy_s,
        extrapolated=float(np.mean([entry.extrapolated for entry in priced])),
        bottleneck=_bottleneck(step_s, busy_s),
    )


def _busiest(pricer: Pricer, module: str, busy_s: np.ndarray) -> float:
    own = [slice(stage.first_node, stage.first_node + stage.dp) for stage in pricer.stages if stage.module == module]
    return float(max(busy_s[nodes].max() for nodes in own))


def _bottleneck(step_s: float, busy_s: dict[str, float]) -> str:
    """The module that computes longest, unless its ranks wait for more than half of the step."""
    module, seconds = max(busy_s.items(), key=lambda entry: entry[1])
    return f"{module} compute" if seconds >= step_s / 2 else "bubble"


def describe_choice(candidates: Sequence[Candidate], config: Config, costs: CostModel) -> str:
    """`plan.yaml`: the best plan, what was predicted for it and from which costs, and why it won."""
    best = candidates[0]
    values = {
        "plan": best.plan.to_dict(),
        "predicted": {
            "step_s": float(f"{best.step_s:.6g}"),
            "idle": round(best.idle, 4),
            "samples_per_s": round(config.train.global_batch_size / best.step_s, 3),
            "memory_bytes": {module: round(size) for module, size in best.memory_bytes.items()},
            "num_batches": best.num_batches,
            # The share of the microbatches that lie outside of what was measured.
            "extrapolated": round(best.extrapolated, 4),
        },
        "why": _why(candidates),
        "num_candidates": len(candidates),
        "costs": f"{config.cluster.device_model}, {costs.source}",
    }
    return yaml.safe_dump(values, sort_keys=False, width=110)


def _why(candidates: Sequence[Candidate]) -> str:
    best = candidates[0]
    why = (
        f"Shortest expected step of {len(candidates)} plans that fit; bound by {best.bottleneck} "
        f"(busiest rank: {', '.join(f'{module} {seconds:.3g} s' for module, seconds in best.busy_s.items())})."
    )
    if len(candidates) > 1:
        second = candidates[1]
        why += f" The next, {second.plan}, takes {second.step_s / best.step_s:.2f}x as long."
    return why
