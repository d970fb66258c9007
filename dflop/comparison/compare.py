"""What each system's step takes on the same batches, costs and cluster, by the same simulator."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from dflop.comparison.system import Batch, System
from dflop.comparison.systems import SYSTEMS
from dflop.config import Config
from dflop.costs import CostModel
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism import Plan
from dflop.planning import GroupedBatches, search_plans, with_finalists_scheduled
from dflop.pricing import Assignment, Pricer, fits, fitted
from dflop.runtime import UserError
from dflop.scheduling import BatchScheduler, GlobalBatches

__all__ = ["OURS", "SystemRow", "compare_systems"]

OURS = "dflop"
# Batches on which a system's plan is chosen, of those that plans are searched on.
_NUM_TRIED = 2


@dataclass(kw_only=True, slots=True)
class SystemRow:
    """What was found of a system: means over the batches, the highest memory, and why there is nothing.

    `variation` is the standard deviation of what microbatches cost over its mean, of the module where that is largest;
    `gap` what the step takes above the lower bound of any schedule of the system's own plan; `num_fitted` of how many
    batches samples had to change places, since memory would not have held what the system decided. `steps_s` are the
    steps of each batch.
    """

    name: str
    plan: str | None = None
    why_not: str | None = None
    step_s: float = np.inf
    idle: float = np.nan
    variation: float = np.nan
    memory_bytes: float = np.nan
    deciding_s: float = np.nan
    gap: float = np.nan
    num_fitted: int = 0
    steps_s: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Step:
    """One batch of one system."""

    step_s: float
    idle: float
    variation: float
    memory_bytes: float
    deciding_s: float
    gap: float
    was_fitted: bool


def compare_systems(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    *,
    num_batches: int,
    progress: Callable[[str], None] = lambda name: None,
) -> list[SystemRow]:
    """A row for each system, ours last, on batches that no plan was chosen on; `progress` is told who is next.

    Raises:
        UserError: when nothing of ours fits, or there are too few samples.
    """
    batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
    num_searched = len(GroupedBatches(config, spec, costs, samples))
    steps = range(num_searched, num_searched + num_batches)
    shapes = {step: samples.take(batches[step]) for step in (*range(_NUM_TRIED), *steps)}
    rows = []
    for system in SYSTEMS:
        progress(system.name)
        rows.append(_row_of(system, config, spec, costs, samples, shapes, steps))
    progress(OURS)
    return [*rows, _our_row(config, spec, costs, samples, batches, shapes, steps)]


def _row_of(
    system: System,
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    shapes: Mapping[int, SampleShapes],
    steps: range,
) -> SystemRow:
    plans = system.plans(config, spec, costs, samples)
    pricers = [_pricer(plan, config, spec, costs) for plan in plans]
    best: tuple[float, Pricer] | None = None
    why_not = "no plan of the kind fits into memory"
    for pricer in pricers:
        try:
            tried = [_step_of(system, pricer, shapes[step], config.seed, step) for step in range(_NUM_TRIED)]
        except UserError as error:
            why_not = str(error)
            continue
        step_s = float(np.mean([own.step_s for own in tried]))
        if best is None or step_s < best[0]:
            best = step_s, pricer
    if best is None:
        return SystemRow(name=system.name, why_not=why_not)
    try:
        return _as_row(
            system.name, best[1].plan, [_step_of(system, best[1], shapes[step], config.seed, step) for step in steps]
        )
    except UserError as error:
        return SystemRow(name=system.name, plan=str(best[1].plan), why_not=str(error))


def _step_of(system: System, pricer: Pricer, shapes: SampleShapes, seed: int, step: int) -> _Step:
    rng = np.random.default_rng([seed, step])
    batch = Batch(pricer=pricer, shapes=shapes, rng=rng)
    _ = batch.problem  # every system is given it
    started = time.perf_counter()
    assignment = system.decide(batch)
    deciding_s = time.perf_counter() - started
    was_fitted = not fits(pricer, shapes, assignment)
    if was_fitted:
        assignment = fitted(pricer, shapes, [assignment], rng)
    return _measured(pricer, shapes, assignment, deciding_s, was_fitted=was_fitted)


def _our_row(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    batches: GlobalBatches,
    shapes: Mapping[int, SampleShapes],
    steps: range,
) -> SystemRow:
    found = search_plans(config, spec, costs, samples)
    plan = with_finalists_scheduled(found, config, spec, costs, samples).best.plan
    pricer = _pricer(plan, config, spec, costs)
    found = []
    with BatchScheduler(samples, pricer, batches, config.schedule, config.seed).open() as scheduler:
        scheduler.schedule(0)  # what is worked out once a run
        for step in steps:
            decided = scheduler.schedule(step)
            own = _measured(pricer, decided.shapes, decided.assignment, decided.deciding_s, was_fitted=False)
            assert abs(own.step_s / decided.step_s - 1) < 1e-9
            found.append(own)
    return _as_row(OURS, plan, found)


def _pricer(plan: Plan, config: Config, spec: ModelSpec, costs: CostModel) -> Pricer:
    return Pricer(plan, costs, spec, config.cluster, frozen=config.model.freeze, precision=config.train.precision)


def _measured(
    pricer: Pricer, shapes: SampleShapes, assignment: Assignment, deciding_s: float, *, was_fitted: bool
) -> _Step:
    times = pricer.stage_times(shapes, assignment)
    timeline = pricer.timeline(times, assignment.slots)
    return _Step(
        step_s=timeline.step_s,
        idle=timeline.idle,
        variation=max(_variations(pricer, times.forward_s + times.backward_s)),
        memory_bytes=max(pricer.memory_bytes(shapes, assignment).values()),
        deciding_s=deciding_s,
        gap=timeline.step_s / pricer.lower_bound_s(shapes) - 1,
        was_fitted=was_fitted,
    )


def _variations(pricer: Pricer, seconds: np.ndarray) -> Iterator[float]:
    """Of what microbatches cost each stage of the plan, [num_nodes, num_microbatches]."""
    for stage in pricer.stages:
        own = seconds[stage.first_node : stage.first_node + pricer.plan.grid(stage.module).dp]
        yield float(own.std() / own.mean()) if own.any() else 0.0


def _as_row(name: str, plan: Plan, steps: list[_Step]) -> SystemRow:
    def mean(column: str) -> float:
        return float(np.mean([getattr(own, column) for own in steps]))

    return SystemRow(
        name=name,
        plan=str(plan),
        step_s=mean("step_s"),
        idle=mean("idle"),
        variation=mean("variation"),
        memory_bytes=max(own.memory_bytes for own in steps),
        deciding_s=mean("deciding_s"),
        gap=mean("gap"),
        num_fitted=sum(own.was_fitted for own in steps),
        steps_s=[own.step_s for own in steps],
    )
