"""The final choice between plans with nearly equal prices: by the step times of scheduled batches.

A plan is priced on batches that are regrouped in a simple way, the same for all plans. In training, the scheduler
regroups each batch for its plan, which shortens the steps of some plans more than those of others. Among plans whose
prices are close to the fastest, the scheduled step times decide. Of plans that train the LLM alike, and differ only in
how they encode, only the one with the least price is scheduled: the schedules of the others hardly differ from its.
Where that one needs more recomputed layers to fit, and still is among the fastest, so is the next one.

A plan is only chosen once the batches of the first steps fit, with more recomputed layers if need be. They may
need more memory than the search's few. The price of a plan whose replicas share samples lets shares lie anywhere, and
so may count too little of it. Where more layers raise the least price, plans that are priced close to the new one are
finalists, too. Scheduled batches may also need less than those that price a plan. So a few of the fastest finalists,
and plans that train the LLM as these do, are tried with fewer recomputed layers. Where no finalist is left, plans are
searched again in which fewer replicas share samples, then as if devices had less memory.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from dflop.balance import LPT
from dflop.base import UserError
from dflop.config import Config, ScheduleConfig, with_value
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.schedule import BatchScheduler, GlobalBatches
from dflop.search.best_first import FINALISTS_PERCENT, NUM_FINALISTS, WORTH_IT, SearchResult, llm_way
from dflop.search.candidate import Candidate, PlanPricer, pricer_of
from dflop.search.cp_sizes import search_plans
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.levels import with_fewer_recomputed, with_more_recomputed, without_recomputed
from dflop.search.space import is_cp_pinned
from dflop.shapes import SampleShapes

__all__ = ["with_finalists_scheduled"]

# One batch may favour a plan that is slower on the mean of others, by more than finalists differ. It hardly does so by
# a hundredth of the step, or where it has many samples.
_NUM_BATCHES, _CLEARLY = 2, 0.01
# The batches of so many steps have to fit; where replicas share samples so many of the fullest, and fewer large ones.
_MOST_STEPS, _NUM_FULLEST = 200, (4, 2)
# So many plans that train the LLM alike are looked at: scheduled if those before do not fit as they are, and tried with
# fewer recomputed layers.
_MOST_ALIKE = 3
# So many of the fastest finalists are tried with fewer recomputed layers, if prices say that they bring this part of
# the step.
_MOST_TRIED, _LEAST_GAIN = 4, 0.001
# Plans that train the LLM as the fastest does get up to so many layers fewer than let the fullest batches fit at once.
_MOST_FEWER = 3
# Of a plan with ever fewer recomputed layers, the last so many that fit are scheduled.
_MOST_SCHEDULED = 2
# A batch of more samples takes seconds to schedule: of the finalists only the one with the least price then counts, or
# where replicas share samples, whose prices say less, one batch.
_MOST_SAMPLES = 2048
# Where no finalist's batches fit, plans are searched for such parts of a device's memory.
_LESS_MEMORY = 0.99, 0.95, 0.8


def with_finalists_scheduled(
    found: SearchResult, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes
) -> SearchResult:
    """The search's result with its choice made by scheduled batches, where several plans have nearly the same price.

    The batches are the first that training will draw, scheduled without CBC, so that the choice is the same each time.
    Where no plan is found that holds them all, the one with the least price is chosen, and `trouble` says what does not
    fit: a run of few steps may never draw it.
    """
    choice = _Choice(config, spec, costs, samples)
    if chosen := choice.among(found):
        return chosen
    for narrower in _narrower(config, found):
        try:
            found_there = search_plans(narrower, spec, costs, samples)
        except UserError:  # nothing fits
            continue
        if chosen := choice.among(found_there):
            return replace(chosen, larger=found.larger, with_more=None)
    try:
        choice.steps_s(found.best.plan, None)
    except UserError as error:
        return replace(found, trouble=str(error))
    return found


def _narrower(config: Config, found: SearchResult) -> Iterator[Config]:
    """Configs of further searches, where no finalist's batches fit."""
    most = max(candidate.plan.grid("llm").cp for alike in _finalists(found, found.best.step_s) for candidate in alike)
    sizes = [] if is_cp_pinned(config) else sorted({size for size in config.plan.cp_sizes if size < most})
    for number in range(len(sizes), 0, -1):
        yield with_value(config, "plan.cp_sizes", sizes[:number])
    for part in _LESS_MEMORY:
        yield with_value(config, "cluster.memory_gib", part * config.cluster.memory_gib)


def _finalists(found: SearchResult, least_s: float) -> list[list[Candidate]]:
    """The plans with prices of little more than `least_s`, those that train the LLM alike together, the ones with the
    least price first."""
    by_way: dict[Hashable, list[Candidate]] = defaultdict(list)
    for candidate in found.candidates:
        if candidate.step_s <= (1 + FINALISTS_PERCENT / 100) * least_s:
            by_way[llm_way(candidate.plan)].append(candidate)
    return list(by_way.values())[:NUM_FINALISTS]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finalist:
    """A finalist with its steps: of scheduled batches, or where `is_expected`, as much longer than those of a plan that
    trains the LLM alike as it is priced."""

    candidate: Candidate
    steps_s: np.ndarray
    is_expected: bool = False

    @property
    def step_s(self) -> float:
        return float(self.steps_s.mean())


def _shortest(scheduled: list[_Finalist]) -> _Finalist:
    """The finalist whose scheduled batches take least."""
    return min((own for own in scheduled if not own.is_expected), key=lambda own: own.step_s)


class _Choice:
    """The choice between plans for one run, by its first batches."""

    def __init__(self, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> None:
        self._config, self._spec, self._samples, self._about = config, spec, samples, (config, spec, costs)
        self._trained = config.model.trained.among(spec.modules)
        self._batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
        self._is_large = config.train.global_batch_size > _MOST_SAMPLES
        self._divided = cache(partial(GroupedBatches, *self._about, samples))

    def among(self, found: SearchResult) -> SearchResult | None:
        """The result with its choice made; None where no finalist's batches fit."""
        fastest = found.candidates[0]
        finalists, shares = _finalists(found, fastest.step_s), found.best.plan.grid("llm").cp > 1
        if self._is_large and not shares:
            finalists = finalists[:1]
        may_recompute_less = any(map(self._may_recompute_less, finalists[0][:_MOST_ALIKE]))
        if len(finalists) < 2 and not shares and not may_recompute_less:
            with suppress(UserError), self._scheduler(found.best.plan) as scheduler:
                _require_fit(scheduler)
                return found
        scheduled = self._with_steps(finalists)
        if not scheduled:
            return None
        least_s = min(own.candidate.step_s for own in scheduled)
        if least_s > fastest.step_s and not self._is_large:
            ways = {llm_way(alike[0].plan) for alike in finalists}
            others = [alike for alike in _finalists(found, least_s) if llm_way(alike[0].plan) not in ways]
            finalists += others
            scheduled += self._with_steps(others, _shortest(scheduled).steps_s)
        priced, chosen = self._fastest(scheduled)
        candidates = [own for own in found.candidates if own is not priced or own is chosen]
        candidates += [] if chosen in candidates else [chosen]
        larger, with_more = found.larger, None
        if larger and WORTH_IT * larger.step_s >= chosen.step_s:
            larger = None
        if found.with_more and without_recomputed(chosen.plan) == without_recomputed(fastest.plan):
            with_more = found.with_more * fastest.step_s / chosen.step_s
        return replace(
            found,
            candidates=sorted(candidates, key=lambda candidate: candidate.step_s),
            chosen=chosen,
            num_finalists=len(finalists),
            larger=larger,
            with_more=with_more if with_more and with_more < 1 else None,
        )

    def _with_steps(self, finalists: list[list[Candidate]], best_s: np.ndarray | None = None) -> list[_Finalist]:
        """The finalists with their steps, without those whose batches are found not to fit. Where the step is clearly
        longer than the best so far, at first `best_s`, not all batches are looked at."""
        scheduled = []
        for alike in finalists:
            last, left = None, iter(alike[:_MOST_ALIKE])
            for candidate in left:
                roomy, steps_s = self._with_room(candidate, best_s)
                if steps_s is None:
                    continue
                best_s = steps_s if best_s is None or steps_s.mean() < best_s.mean() else best_s
                last = _Finalist(candidate=roomy, steps_s=steps_s)
                scheduled.append(last)
                if roomy is candidate or steps_s.mean() > (1 + _CLEARLY) * best_s.mean():
                    break
            for other in left if last else ():
                steps_s = other.step_s / last.candidate.step_s * last.steps_s
                scheduled.append(_Finalist(candidate=other, steps_s=steps_s, is_expected=True))
        return scheduled

    def _fastest(self, scheduled: list[_Finalist]) -> tuple[Candidate, Candidate]:
        """The fastest of the finalists, as it was found and with fewer recomputed layers if its batches have room."""
        best = was = _shortest(scheduled)
        nearest = [own for own in scheduled if self._may_recompute_less(own.candidate)]
        nearest = sorted(nearest, key=lambda own: own.step_s)[:_MOST_TRIED]
        for finalist in nearest:
            fewer = self._with_fewer_recomputed(finalist, best.step_s, 0)
            best, was = (fewer, finalist) if fewer else (best, was)
        way = llm_way(best.candidate.plan)
        for finalist in nearest:
            if llm_way(finalist.candidate.plan) == way:
                fewer = self._with_fewer_recomputed(finalist, best.step_s, _MOST_FEWER)
                best, was = (fewer, finalist) if fewer else (best, was)
        return was.candidate, best.candidate

    def _may_recompute_less(self, candidate: Candidate) -> bool:
        """Whether a plan is tried with fewer recomputed layers, which takes too long with large batches."""
        return candidate.plan.checkpointing and not self._pins_recomputed and not self._is_large

    def _with_room(self, candidate: Candidate, best_s: np.ndarray | None) -> tuple[Candidate, np.ndarray | None]:
        """The candidate and its `steps_s`. If its batches do not fit into memory, it gets more recomputed layers until
        they do; None where that does not help."""
        with suppress(UserError):
            return candidate, self.steps_s(candidate.plan, best_s)
        if self._pins_recomputed:
            return candidate, None
        pricer = self._pricer(candidate.plan)
        how = {"spares_attention": pricer.spares_attention}
        more, plans = candidate.plan, []
        while not plans or more != plans[-1]:
            plans.append(more)
            more = with_more_recomputed(more, self._spec, self._trained, **how)
        for plan in plans[1:] if self._holds_all(plans[-1]) else ():
            roomy = replace(pricer.recomputing(plan).candidate(), bottleneck="memory")
            with suppress(UserError):
                return roomy, self.steps_s(plan, best_s)
        return candidate, None

    def _with_fewer_recomputed(self, finalist: _Finalist, best_s: float, num_beyond: int) -> _Finalist | None:
        """The finalist with fewer recomputed layers, if its scheduled batches then fit and take less than `best_s`:
        with as few as let the fullest batches fit at once, or up to `num_beyond` less. None if not."""
        plan = finalist.candidate.plan
        pricer = self._pricer(plan)
        priced_s, how = pricer.mean_step_s(), {"spares_attention": pricer.spares_attention}
        plans = list(with_fewer_recomputed(plan, self._spec, self._trained, **how))

        def may_be_faster(number: int) -> bool:
            """Whether the plan would be clearly the fastest, if it is as much faster than this finalist as priced."""
            ratio = pricer.recomputing(plans[number]).mean_step_s() / priced_s
            return ratio * finalist.step_s < (1 - _LEAST_GAIN) * best_s

        if not may_be_faster(-1):
            return None
        with self._scheduler(plan) as scheduler:
            fullest = scheduler.fullest(_MOST_STEPS, _NUM_FULLEST[0])

            def lacks_room(plan: Plan) -> bool:
                return not scheduler.priced_by(pricer_of(plan, *self._about)).holds_quickly(fullest)

            num_fitting = bisect_left(plans, True, key=lacks_room)
            last = min(num_fitting + num_beyond, len(plans))
            if not last or not may_be_faster(last - 1):
                return None
            for plan in plans[num_fitting:last]:
                try:
                    scheduler.priced_by(pricer_of(plan, *self._about)).check(
                        _MOST_STEPS, _NUM_FULLEST[0], searches=False
                    )
                except UserError:
                    break
                num_fitting += 1
        for plan in reversed(plans[max(0, num_fitting - _MOST_SCHEDULED) : num_fitting]):
            with suppress(UserError):
                steps_s, memory_bytes = self._scheduled(plan)
                if steps_s.mean() < best_s:
                    fewer = pricer.recomputing(plan).candidate()
                    bottleneck = "memory" if plan.checkpointing or plan.offloads else fewer.bottleneck
                    # In the search's groups some batches may not fit.
                    fewer = replace(fewer, memory_bytes=memory_bytes, bottleneck=bottleneck)
                    return _Finalist(candidate=fewer, steps_s=steps_s)
        return None

    def _scheduled(self, plan: Plan) -> tuple[np.ndarray, dict[str, float]]:
        """The step times of scheduled batches, [_NUM_BATCHES], and by module the peak bytes of its fullest rank.

        Raises:
            UserError: where the batches of the first steps do not fit into memory.
        """
        with self._scheduler(plan) as scheduler:
            _require_fit(scheduler)
            schedules = [scheduler.schedule(step) for step in range(_NUM_BATCHES)]
            peaks = [scheduler.pricer.memory_bytes(own.shapes, own.assignment) for own in schedules]
        steps_s = np.array([own.step_s for own in schedules])
        return steps_s, {module: max(own[module] for own in peaks) for module in peaks[0]}

    def _holds_all(self, plan: Plan) -> bool:
        """Whether the batches of the first steps fit into memory, as `_require_fit` says."""
        with self._scheduler(plan) as scheduler:
            try:
                _require_fit(scheduler)
            except UserError:
                return False
        return True

    def steps_s(self, plan: Plan, best_s: np.ndarray | None) -> np.ndarray:
        """The step times of scheduled batches, [_NUM_BATCHES], or [1] of large ones. Where the first is clearly longer
        than that of the best plan so far, `best_s`, the others are taken to be as much longer.

        Raises:
            UserError: where they do not fit into memory, or where they are shorter than `best_s` and other batches do
                not.
        """
        checks_first = best_s is None or (plan.grid("llm").cp > 1 and not self._is_large)  # then faster than searches
        with self._scheduler(plan) as scheduler:
            if checks_first:
                _require_fit(scheduler)
            first_s = scheduler.schedule(0).step_s
            if best_s is not None and first_s > (1 + _CLEARLY) * best_s[0]:
                return best_s * (first_s / best_s[0])
            others = range(1, 1 if self._is_large else _NUM_BATCHES)
            steps_s = np.array([first_s, *(scheduler.schedule(step).step_s for step in others)])
            if not checks_first and steps_s.mean() < best_s.mean():
                _require_fit(scheduler)
        return steps_s

    @property
    def _pins_recomputed(self) -> bool:
        fixed = self._config.plan.fixed
        return fixed is not None and fixed.checkpointing is not None

    def _pricer(self, plan: Plan) -> PlanPricer:
        return PlanPricer(plan, *self._about, self._divided(plan.grid("llm").cp), LPT)

    def _scheduler(self, plan: Plan) -> AbstractContextManager[BatchScheduler]:
        pricer, schedule = pricer_of(plan, *self._about), ScheduleConfig(policy="search")
        return BatchScheduler(self._samples, pricer, self._batches, schedule, self._config.seed).open()


def _require_fit(scheduler: BatchScheduler) -> None:
    """Check that the batches of the first steps fit into memory; where replicas share samples, the fullest of these.

    Raises:
        UserError: where one does not.
    """
    is_large = scheduler.batches.global_batch_size > _MOST_SAMPLES
    shares = scheduler.pricer.plan.grid("llm").cp > 1
    # A search would take longer.
    scheduler.check(_MOST_STEPS, _NUM_FULLEST[is_large] if shares else None, searches=False)
