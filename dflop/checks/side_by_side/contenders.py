"""Systems to be trained for a comparison: the plan of each, its schedules of the first global batches, its predictions.

They are ours, our plan with random groups, and the compared systems, each with the fastest plan of its kind. For a
system without a plan that fits, or with one for another number of devices, there is only the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dflop.base import UserError
from dflop.comparison.compare import (
    NUM_TRIED,
    OURS,
    SystemRow,
    fastest_that_fits,
    row_of_schedules,
)
from dflop.comparison.system import System
from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer, StepSchedule
from dflop.search import pricer_of
from dflop.shapes import SampleShapes

__all__ = ["OURS_AT_RANDOM", "Contender", "contenders"]

OURS_AT_RANDOM = "dflop's plan, random groups"


@dataclass(frozen=True, slots=True)
class Contender:
    """`row` holds the predictions for the counted steps; without a plan, its `why_not` says why."""

    row: SystemRow
    plan: Plan | None = None
    schedules: Sequence[StepSchedule] = ()

    @property
    def name(self) -> str:
        return self.row.name


def contenders(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    plan: Plan,
    *,
    systems: Sequence[System],
    num_steps: int,
    counted: range,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Contender]:
    """Ours with this plan, the same plan with random groups, and `systems`, with schedules of the first `num_steps`.

    Rows hold means over the `counted` steps.

    Raises:
        UserError: when no assignment of a batch to our plan is found that fits into memory.
    """
    batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
    shapes = {step: samples.take(batches[step]) for step in range(max(num_steps, NUM_TRIED))}
    pricer = pricer_of(plan, config, spec, costs)
    found = []
    for name, policy in ((OURS, config.schedule.policy), (OURS_AT_RANDOM, "random")):
        progress(name)
        with BatchScheduler(samples, pricer, batches, config.schedule, config.seed).open() as scheduler:
            schedules = [scheduler.schedule(step, policy) for step in range(num_steps)]
        found.append(_contender(name, pricer, schedules, counted))
    for system in systems:
        progress(system.name)
        found.append(_of_system(system, config, spec, costs, samples, shapes, plan.world_size, num_steps, counted))
    return found


def _of_system(
    system: System,
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    shapes: Mapping[int, SampleShapes],
    num_ranks: int,
    num_steps: int,
    counted: range,
) -> Contender:
    try:
        pricer, schedules = fastest_that_fits(system, config, spec, costs, samples, shapes, range(num_steps))
    except UserError as error:
        return Contender(SystemRow(name=system.name, why_not=str(error)))
    if pricer.plan.world_size != num_ranks:
        reason = f"its plan has {pricer.plan.world_size} ranks, and ours {num_ranks}"
        return Contender(SystemRow(name=system.name, why_not=reason))
    return _contender(system.name, pricer, schedules, counted)


def _contender(name: str, pricer: Pricer, schedules: Sequence[StepSchedule], counted: range) -> Contender:
    row = row_of_schedules(name, pricer, schedules[counted.start : counted.stop])
    return Contender(row, pricer.plan, schedules)
