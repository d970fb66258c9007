"""Each system's step time on the same batches, costs and cluster, by the same simulator."""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean

import numpy as np

from dflop.base import UserError
from dflop.comparison.system import System
from dflop.comparison.systems import SYSTEMS
from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.schedule import Assignment, BatchScheduler, GlobalBatches, Pricer, StepSchedule, fits, fitted, schedule_of
from dflop.search import GroupedBatches, pricer_of, search_plans, with_finalists_scheduled
from dflop.search.levels import with_fewer_recomputed, with_more_recomputed
from dflop.shapes import SampleShapes

__all__ = [
    "NUM_TRIED",
    "OURS",
    "SystemRow",
    "compare_systems",
    "fastest_that_fits",
    "row_of_schedules",
    "scheduled_by",
]

OURS = "dflop"
# The number of batches on which a system's plan is chosen; they are among those that plans are searched on.
NUM_TRIED = 2
# Where samples change places, which takes seconds if it fails, an encoder is recomputed in so many steps, and the LLM.
_FEW_PARTS = 1, 2
# How many recomputed layers of each device less than in the search are tried.
_NUM_FEWER = 3
# What the status of a schedule says whose samples had to change places.
_MADE_TO_FIT = "made to fit"


@dataclass(kw_only=True, slots=True)
class SystemRow:
    """The results of a system: means over the batches, and the peak memory over them.

    `variation` is the coefficient of variation of the microbatches' seconds in a stage, for the stage where it is
    largest. `gap` is the step time over the lower bound of any schedule of the system's own plan, less 1. `num_fitted`
    is the number of batches in which samples had to change places, because the system's assignment did not fit into
    memory. `steps_s` are the step times of the batches. Where there is no result, `why_not` says why.
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


def compare_systems(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    *,
    num_batches: int,
    systems: Sequence[System] = SYSTEMS,
    progress: Callable[[str], None] = lambda name: None,
) -> list[SystemRow]:
    """A row for each system, ours last, on `num_batches` batches on which no plan was chosen.

    `progress` is called with the name of each system before it is priced.

    Raises:
        UserError: when none of our plans fits, or there are too few samples.
    """
    batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
    num_searched = len(GroupedBatches(config, spec, costs, samples))
    steps = range(num_searched, num_searched + num_batches)
    shapes = {step: samples.take(batches[step]) for step in (*range(NUM_TRIED), *steps)}
    rows = []
    for system in systems:
        progress(system.name)
        rows.append(_row_of(system, config, spec, costs, samples, shapes, steps))
    progress(OURS)
    return [*rows, _our_row(config, spec, costs, samples, batches, steps)]


def _row_of(
    system: System,
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    shapes: Mapping[int, SampleShapes],
    steps: range,
) -> SystemRow:
    try:
        return row_of_schedules(system.name, *fastest_that_fits(system, config, spec, costs, samples, shapes, steps))
    except UserError as error:
        return SystemRow(name=system.name, why_not=str(error))


def fastest_that_fits(
    system: System,
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    shapes: Mapping[int, SampleShapes],
    steps: Iterable[int],
) -> tuple[Pricer, list[StepSchedule]]:
    """The pricer of the system's fastest plan that holds the batches of these steps, and its schedules of them.

    A plan's speed is its mean step time over the first `NUM_TRIED` batches of `shapes`, assigned by the system's own
    policy. Plans with up to `_NUM_FEWER` recomputed layers less are tried, too, as the search's batches may need more
    memory than the system's own. Where one of `shapes` does not fit, a few layers more are recomputed, unless the
    system rules it out: whoever runs out of memory does that. Samples change places before that where the system
    `moves_samples`, else only where no plan holds all batches, even with all layers recomputed.

    Raises:
        UserError: saying why no plan fits.
    """
    trained = config.model.trained.among(spec.modules)
    waiting: list[tuple[float, int, Pricer, dict[int, tuple[StepSchedule, bool]]]] = []
    seen: set[str] = set()
    refusals = ["no plan of the kind fits into memory"]

    def add(plan: Plan) -> None:
        if str(plan) not in seen:
            seen.add(str(plan))
            pricer = pricer_of(plan, config, spec, costs)
            try:
                tried = {
                    step: _schedule_and_fit(system, pricer, shapes[step], config.seed, step)
                    for step in range(NUM_TRIED)
                }
            except UserError as error:  # the system cannot group them for this plan
                refusals.append(f"{plan}: {error}")
                return
            step_s = fmean(schedule.step_s for schedule, _ in tried.values())
            heapq.heappush(waiting, (step_s, len(seen), pricer, tried))

    for candidate in system.plans(config, spec, costs, samples):
        add(candidate.plan)
        spares = {"spares_attention": any(candidate.plan.grid("llm").attention_kept)}
        fewer = with_fewer_recomputed(candidate.plan, spec, trained, **spares) if system.recomputes(config) else ()
        for plan in islice(fewer, _NUM_FEWER):
            add(plan)
    last = []
    while waiting:
        _, _, pricer, schedules = heapq.heappop(waiting)
        for step, own in shapes.items():
            if not all(has_room for _, has_room in schedules.values()):
                break
            if step not in schedules:
                schedules[step] = _schedule_and_fit(system, pricer, own, config.seed, step)
        if all(has_room for _, has_room in schedules.values()):
            return pricer, [schedules[step][0] for step in steps]
        more = pricer.plan
        if system.recomputes(config):
            how = {"parts": _FEW_PARTS} if system.moves_samples else {}
            more = with_more_recomputed(pricer.plan, spec, trained, **how)
        if more == pricer.plan:
            last.append(pricer)
        add(more)
    for pricer in last:
        try:
            return pricer, [scheduled_by(system, pricer, shapes[step], config.seed, step) for step in steps]
        except UserError as error:
            refusals.append(f"{pricer.plan}: {error}")
    raise UserError(refusals[-1])


def scheduled_by(system: System, pricer: Pricer, shapes: SampleShapes, seed: int, step: int) -> StepSchedule:
    """A system's schedule of a batch. An assignment that does not fit into memory is changed until it does, which the
    schedule's status says; `deciding_s` is without that.

    Raises:
        UserError: when no assignment is found that fits into memory.
    """
    assignment, deciding_s, rng = _grouped_by(system, pricer, shapes, seed, step)
    status = ""
    if not fits(pricer, shapes, assignment):
        assignment, status = fitted(pricer, shapes, [assignment], rng), _MADE_TO_FIT
    return schedule_of(pricer, shapes, assignment, step=step, policy=system.name, status=status, deciding_s=deciding_s)


def _schedule_and_fit(
    system: System, pricer: Pricer, shapes: SampleShapes, seed: int, step: int
) -> tuple[StepSchedule, bool]:
    """A system's schedule of a batch, and whether it fits into memory: with samples that change places, if the system
    moves them and that helps, else as the system groups it."""
    assignment, deciding_s, rng = _grouped_by(system, pricer, shapes, seed, step)
    has_room, status = fits(pricer, shapes, assignment), ""
    if system.moves_samples and not has_room:
        with suppress(UserError):
            assignment = fitted(pricer, shapes, [assignment], rng)
            has_room, status = True, _MADE_TO_FIT
    how = {"step": step, "policy": system.name, "status": status, "deciding_s": deciding_s}
    return schedule_of(pricer, shapes, assignment, **how), has_room


def _grouped_by(
    system: System, pricer: Pricer, shapes: SampleShapes, seed: int, step: int
) -> tuple[Assignment, float, np.random.Generator]:
    """A system's assignment of a batch, the seconds to find it, and the generator of random numbers as it is then."""
    rng = np.random.default_rng([seed, step])
    # Made before the clock starts, since every system gets it.
    problem = replace(pricer.problem(shapes), max_bucket_tokens=None)
    started = time.perf_counter()
    assignment = pricer.assign(shapes, *np.divmod(system.policy.buckets(problem, rng), problem.num_microbatches))
    return assignment, time.perf_counter() - started, rng


def _our_row(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    batches: GlobalBatches,
    steps: range,
) -> SystemRow:
    found = search_plans(config, spec, costs, samples)
    plan = with_finalists_scheduled(found, config, spec, costs, samples).best.plan
    pricer = pricer_of(plan, config, spec, costs)
    with BatchScheduler(samples, pricer, batches, config.schedule, config.seed).open() as scheduler:
        scheduler.schedule(0)  # so that work done once a run is not timed below
        schedules = [scheduler.schedule(step) for step in steps]
    return row_of_schedules(OURS, pricer, schedules)


def _variations(pricer: Pricer, seconds: np.ndarray) -> Iterator[float]:
    """The coefficient of variation of the microbatches' `seconds` [num_nodes, num_microbatches] in each stage."""
    for stage in pricer.stages:
        stage_s = seconds[stage.first_node : stage.first_node + pricer.plan.grid(stage.module).dp]
        yield float(stage_s.std() / stage_s.mean()) if stage_s.any() else 0.0


def row_of_schedules(name: str, pricer: Pricer, schedules: Sequence[StepSchedule]) -> SystemRow:
    """The row of a system: means over its schedules, and the peak of their memory."""
    variations, held_bytes = [], []
    for own in schedules:
        times = pricer.stage_times(own.shapes, own.assignment)
        variations.append(max(_variations(pricer, times.forward_s + times.backward_s)))
        held_bytes.append(max(pricer.memory_bytes(own.shapes, own.assignment).values()))
    return SystemRow(
        name=name,
        plan=str(pricer.plan),
        step_s=fmean(own.step_s for own in schedules),
        idle=fmean(own.idle for own in schedules),
        variation=fmean(variations),
        memory_bytes=max(held_bytes),
        deciding_s=fmean(own.deciding_s for own in schedules),
        gap=fmean(own.step_s / own.lower_bound_s - 1 for own in schedules),
        num_fitted=sum(_MADE_TO_FIT in own.status for own in schedules),
        steps_s=[own.step_s for own in schedules],
    )
