"""The final choice between plans with nearly equal prices: by the step times of scheduled batches.

A plan is priced on batches that are regrouped in a simple way, the same for all plans. In training, the scheduler
regroups each batch for its plan, which shortens the steps of some plans more than those of others. Among plans whose
prices are close to the fastest, the scheduled step times decide. Of plans that train the LLM alike, and differ only in
how they encode, only the one with the least price is scheduled: the schedules of the others hardly differ from its.
"""

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from dflop.base import UserError
from dflop.config import Config, ScheduleConfig
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.schedule import BatchScheduler, GlobalBatches
from dflop.search.best_first import FINALISTS_PERCENT, NUM_FINALISTS, SearchResult
from dflop.search.candidate import Candidate, pricer_of
from dflop.shapes import SampleShapes

__all__ = ["with_finalists_scheduled"]

# One batch may favour a plan that is slower on the mean of others, by more than finalists differ.
_NUM_BATCHES = 2
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
    most_s = (1 + FINALISTS_PERCENT / 100) * found.best.step_s
    by_llm: dict[Hashable, Candidate] = {}
    for candidate in found.candidates[:NUM_FINALISTS]:
        if candidate.step_s <= most_s:
            by_llm.setdefault(_of_llm(candidate.plan), candidate)
    finalists = list(by_llm.values())
    if len(finalists) < 2:
        return found
    scheduled_s = [_scheduled_s(plan, config, spec, costs, samples) for plan in finalists]
    if not np.isfinite(scheduled_s).any():
        return found
    return replace(found, chosen=finalists[int(np.argmin(scheduled_s))], num_finalists=len(finalists))


def _of_llm(plan: Plan) -> Hashable:
    """How a plan trains the LLM."""
    return plan.placement, plan.schedule, plan.num_chunks, plan.num_microbatches, plan.grid("llm")


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
