"""The final choice between plans with nearly equal prices: by the step times of scheduled batches.

A plan is priced on batches that are regrouped in a simple way, the same for all plans. In training, the scheduler
regroups each batch for its plan, which shortens the steps of some plans more than those of others. Among plans whose
prices are close to the fastest, the scheduled step times decide: of one batch, and of plans that are still close of
another one.
"""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from dflop.base import UserError
from dflop.config import Config, ScheduleConfig
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.schedule import BatchScheduler, GlobalBatches
from dflop.search.best_first import FINALISTS_WITHIN, NUM_FINALISTS, SearchResult
from dflop.search.candidate import pricer_of
from dflop.shapes import SampleShapes

__all__ = ["with_finalists_scheduled"]

# A finalist is scheduled a second time if its first batch takes at most so many times that of the fastest.
_STILL_WITHIN = 1.01
# A batch of more samples takes seconds to schedule, for each of the finalists.
_MOST_SAMPLES = 2048


def with_finalists_scheduled(
    found: SearchResult, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes
) -> SearchResult:
    """The search's result with its choice made by scheduled batches, where several plans have nearly the same price.

    The batches are the first that training will draw, scheduled without CBC, so that the choice is the same each time.
    """
    if config.train.global_batch_size > _MOST_SAMPLES:
        return found
    close = [plan for plan in found.candidates if plan.step_s <= FINALISTS_WITHIN * found.best.step_s][:NUM_FINALISTS]
    if len(close) < 2:
        return found
    batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
    with ExitStack() as opened:
        schedulers = [
            opened.enter_context(
                BatchScheduler(
                    samples,
                    pricer_of(plan.plan, config, spec, costs),
                    batches,
                    ScheduleConfig(policy="search"),
                    config.seed,
                ).open()
            )
            for plan in close
        ]
        steps_s = np.array([_step_s(scheduler, 0) for scheduler in schedulers])
        if not np.isfinite(steps_s).any():
            return found
        still_close = np.flatnonzero(steps_s <= _STILL_WITHIN * steps_s.min())
        mean_s = np.full(len(close), np.inf)
        for number in still_close:
            second_s = _step_s(schedulers[number], 1) if len(still_close) > 1 else steps_s[number]
            mean_s[number] = (steps_s[number] + second_s) / 2
        if not np.isfinite(mean_s).any():
            return found
    return replace(found, chosen=close[int(np.argmin(mean_s))], num_finalists=len(close))


def _step_s(scheduler: BatchScheduler, step: int) -> float:
    """The step time of a scheduled batch; infinite where it does not fit into memory."""
    try:
        return scheduler.schedule(step).step_s
    except UserError:
        return np.inf
