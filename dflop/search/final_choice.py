"""The final choice between plans with nearly equal prices: by the step times of scheduled batches.

A plan is priced on batches that are regrouped in a simple way, the same for all plans. In training, the scheduler
regroups each batch for its plan, which shortens the steps of some plans more than those of others. Among plans whose
prices are within a percent of the fastest, the scheduled step times decide.
"""

from dataclasses import replace

import numpy as np

from dflop.base import UserError
from dflop.config import Config, ScheduleConfig
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.schedule import BatchScheduler, GlobalBatches
from dflop.search.best_first import NUM_FINALISTS, SearchResult
from dflop.search.candidate import Candidate, pricer_of
from dflop.shapes import SampleShapes

__all__ = ["FINALISTS_WITHIN", "with_finalists_scheduled"]

# The most that a finalist's price may be, as a multiple of the fastest plan's.
FINALISTS_WITHIN = 1.01
_NUM_BATCHES = 2
# A batch of more samples takes seconds to schedule, for each of the finalists.
_MOST_SAMPLES = 2048


def with_finalists_scheduled(
    found: SearchResult, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes
) -> SearchResult:
    """The search's result with its choice made by scheduled batches, where several plans are priced within a percent.

    The batches are the first that training will draw, scheduled without CBC, so that the choice is the same each time.
    """
    if config.train.global_batch_size > _MOST_SAMPLES:
        return found
    close = [plan for plan in found.candidates if plan.step_s <= FINALISTS_WITHIN * found.best.step_s][:NUM_FINALISTS]
    if len(close) < 2:
        return found
    scheduled_s = [_scheduled_s(plan, config, spec, costs, samples) for plan in close]
    if not np.isfinite(scheduled_s).any():
        return found
    return replace(found, chosen=close[int(np.argmin(scheduled_s))], num_finalists=len(close))


def _scheduled_s(
    candidate: Candidate, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes
) -> float:
    """The mean step time of scheduled batches; infinite where a batch does not fit into memory."""
    pricer = pricer_of(candidate.plan, config, spec, costs)
    batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
    with BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="search"), config.seed).open() as scheduler:
        try:
            return float(np.mean([scheduler.schedule(step).step_s for step in range(_NUM_BATCHES)]))
        except UserError:
            return np.inf
