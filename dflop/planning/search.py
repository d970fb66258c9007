"""The search: the plan with the shortest expected step among all that fit into memory.

This is a best-first search. Every row of the space has a lower bound on its step time (`bounds`), and two tighter ones
that take longer to compute. The row with the lowest bound is always the next one. It gets its next tighter bound and
goes back into the queue; a row that has its tightest bound is priced by simulation, one batch after the other, and is
dropped as soon as enough others are certain to be faster. The search ends when the lowest bound in the queue is no
better than what was found. The result is then the argmin of the space, although most rows were never simulated.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from dflop.config import Config, PlanConfig, most_memory_gib
from dflop.costs import CostModel
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism import Plan
from dflop.planning.bounds import LowerBounds, lower_bounds
from dflop.planning.candidate import Candidate, PlanPricer
from dflop.planning.grouped_batches import GroupedBatches
from dflop.planning.least_links import LeastLinks
from dflop.planning.least_memory import LeastMemory
from dflop.planning.pins import pins_of
from dflop.planning.pipelines import MeanPipelines
from dflop.planning.space import Splits, enumerate_space, plan_of
from dflop.planning.splits import balanced_splits
from dflop.planning.trainable import trainable_rows
from dflop.pricing import BYTES_PER_VALUE
from dflop.runtime import UserError

__all__ = ["NUM_FINALISTS", "SearchResult", "more_than", "search_plans"]

# How many of the fastest plans are found for certain where people compare them, and in spaces of at most `_FEW_PLANS`,
# where that takes no time. In other searches it is as many as `finalists` tells apart.
_NUM_COMPARED, _FEW_PLANS = 10, 20_000
NUM_FINALISTS = 3
# To say what more memory would bring: of the plans that memory excludes, `_MOST_MISSES` are looked at and `_NUM_LARGER`
# of them priced. Among few plans `_NUM_LARGER_OF_FEW` are priced, so that the one that needs least is rarely missed.
_MOST_MISSES, _NUM_LARGER, _NUM_LARGER_OF_FEW = 4096, 64, 512
# Where no plan fits: how many of those with the lowest bounds are asked what memory they need.
_NUM_NEAREST = 256
# Bounds are summed in another order than prices, so rounding can put a bound above its price. This margin keeps such a
# plan in.
_MARGIN = 1 + 1e-9
_PROGRESS_EVERY = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What a search found.

    `candidates` are those priced on all batches, fastest first; the first is the fastest of the space.
    `least_bound_s` is the lowest bound of a plan that was not priced to the end: no plan of the space is faster than
    it or the first candidate. `larger` is faster than all of them, and needs a little more memory than there is.
    """

    candidates: list[Candidate]
    num_plans: int
    num_priced: int
    least_bound_s: float
    larger: Candidate | None
    # Of plans priced alike, the one whose scheduled batches take least (`finalists`), and among how many.
    chosen: Candidate | None = None
    num_finalists: int = 0

    @property
    def best(self) -> Candidate:
        """The chosen plan: the fastest that can be trained today, or where there is none the fastest."""
        if self.chosen is not None:
            return self.chosen
        return next((own for own in self.candidates if own.why_not_runnable is None), self.candidates[0])

    @property
    def passed_over(self) -> Candidate | None:
        """A faster plan that cannot be trained today."""
        first = self.candidates[0]
        return None if first.why_not_runnable is None or first is self.best else first


def search_plans(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    grouping: str = "balanced",
    within: PlanConfig | None = None,
    splits_evenly: bool = False,
    compares: bool = False,
) -> SearchResult:
    """Search the config's space; `progress` is called with the number of decided plans and of all.

    `grouping` is how a batch is shared out (`PlanPricer`); `within` are other limits than those of `config.plan`;
    `splits_evenly` leaves uneven splits out; `compares` finds the ten fastest plans for certain.

    Activation checkpointing costs time: a plan with it is the faster one only where the same does not fit without.

    Raises:
        UserError: when the space is empty or nothing fits, naming the limit and the nearest plan.
    """
    batches = GroupedBatches(config, spec, costs, samples)
    splits = {} if splits_evenly else balanced_splits(config, spec, costs, batches)
    rows = enumerate_space(config, spec, costs.tp_sizes, splits, within)
    links = LeastLinks(costs, spec, config.cluster, config.model.freeze, BYTES_PER_VALUE[config.train.precision])
    bounds = lower_bounds(rows, batches.shapes, costs, spec, splits, links)
    num_best = _NUM_COMPARED if compares or len(rows) <= _FEW_PLANS else NUM_FINALISTS
    search = _Search(config, spec, costs, batches, rows, splits, bounds, links, grouping, num_best)
    mean_s = bounds.means()
    order = np.argsort(mean_s, kind="stable")
    least_s, order = mean_s[order].tolist(), order.tolist()
    waiting: list[tuple[float, int, int]] = []  # bound, how often it was tightened, row
    done, least_bound_s = 0, np.inf
    while waiting or done < len(order):
        if waiting and (done == len(order) or waiting[0][0] <= least_s[done]):
            bound_s, level, row = heapq.heappop(waiting)
        else:
            bound_s, level, row = least_s[done], 0, order[done]
            done += 1
            if done % _PROGRESS_EVERY == 0:
                progress(done, len(order))
        if bound_s >= search.threshold_s:
            least_bound_s = bound_s
            break
        if search.may_be_among_the_best(row, bound_s):
            tighter_s = search.look_at(row, level, bound_s)
            if tighter_s is not None:
                heapq.heappush(waiting, (tighter_s, level + 1, row))
    progress(len(order), len(order))
    return search.result(least_bound_s)


class _Search:
    """Rows that were looked at, and the fastest of them: of all, and of those that can be trained today."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        costs: CostModel,
        batches: GroupedBatches,
        rows: pl.DataFrame,
        splits: Splits,
        bounds: LowerBounds,
        links: LeastLinks,
        grouping: str,
        num_best: int,
    ) -> None:
        self._num_best = num_best
        self._config, self._rows, self._splits, self._bounds = config, rows, splits, bounds
        self._columns = rows.columns  # polars makes the list anew each time it is asked
        self._about = (config, spec, costs, batches, grouping)
        self._num_batches = len(batches)
        self._budget_bytes = config.cluster.memory_gib * 2**30
        # Of all plans, and of those that can be trained today, as heaps with the slowest on top.
        self._fastest: dict[bool, list[float]] = {True: [], False: []}
        # Step time, memory and row of what was priced on all batches.
        self._priced: list[tuple[float, float, int]] = []
        self._misses: list[tuple[float, int]] = []
        # Of each layout of the LLM: bytes of its stages and of a device with them, and the step of its mean pipeline.
        self._llm_place = bounds.llm_place.tolist()
        self._llm_bytes: dict[int, np.ndarray] = {}
        self._device_bytes: dict[int, float] = {}
        self._llm_s: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._llm_each_s: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._pipelines = MeanPipelines(config, spec, costs, batches, splits, links, grouping)
        self._memory = LeastMemory(spec, costs, batches, splits, grouping, config.model.freeze, links.value_bytes)
        self._is_runnable = trainable_rows(spec.family, rows, splits).tolist()
        self._kinds = {False, *self._is_runnable}
        # The slowest of the fastest, by kind; whose bound is not below the higher cannot be among those asked for.
        self._slowest_s = dict.fromkeys((False, True), np.inf)
        self.threshold_s = np.inf

    def look_at(self, row: int, level: int, bound_s: float) -> float | None:
        """A tighter bound than that of the level, or after the last the price; None of what is decided."""
        return (self._by_mean_batch, self._by_batches, self._price)[level](row, bound_s)

    def _by_mean_batch(self, row: int, bound_s: float) -> float | None:
        place = self._llm_place[row]
        if place not in self._llm_bytes:
            self._llm_bytes[place] = self._memory.of_llm(self._values(row))
            self._device_bytes[place] = self._memory.of_device(self._llm_bytes[place].max())
        if not self._fits(row, self._device_bytes[place] / _MARGIN):
            return None
        return max(bound_s, self._mean_bound_s(row, self._values(row)))

    def _by_batches(self, row: int, bound_s: float) -> float | None:
        values = self._values(row)
        if not self._fits(row, self._memory.least_bytes(values, self._llm_bytes[self._llm_place[row]]) / _MARGIN):
            return None
        return max(bound_s, float(self._batch_bounds_s(row, values).mean()))

    def _price(self, row: int, bound_s: float) -> None:
        values = self._values(row)
        pricer = self._pricer(plan_of(values, self._splits))
        if not self._fits(row, needed_bytes := max(pricer.memory_bytes(0).values())):
            return
        step_s = self._mean_s(pricer, row, values, lambda least_s: self.may_be_among_the_best(row, least_s))
        if step_s is None:
            return
        for batch in range(1, self._num_batches):  # a later batch may hold a fuller microbatch
            needed_bytes = max(needed_bytes, *pricer.memory_bytes(batch).values())
            if not self._fits(row, needed_bytes):
                return
        needed_bytes = max(needed_bytes, pricer.alone_bytes())
        if not self._fits(row, needed_bytes):
            return
        assert step_s * _MARGIN >= bound_s, (values, step_s, bound_s)
        self._priced.append((step_s, needed_bytes, row))
        for kind in {False, self._is_runnable[row]}:
            heap = self._fastest[kind]
            (heapq.heappushpop if len(heap) == self._num_best else heapq.heappush)(heap, -step_s)
            if len(heap) == self._num_best:
                self._slowest_s[kind] = -heap[0]
        self.threshold_s = max(self._slowest_s[kind] for kind in self._kinds)

    def result(self, least_bound_s: float) -> SearchResult:
        if not self._priced:
            raise UserError(self._why_nothing_fits())
        candidates = [self._pricer(self._plan(row)).candidate() for _, _, row in sorted(self._priced)]
        return SearchResult(
            candidates=[self._with_memory_named(own) for own in candidates],
            num_plans=len(self._rows),
            num_priced=len(self._priced),
            least_bound_s=least_bound_s,
            larger=self._larger(candidates[0].step_s),
        )

    def _fits(self, row: int, needed_bytes: float) -> bool:
        if needed_bytes > self._budget_bytes:
            self._misses.append((needed_bytes, row))
        return needed_bytes <= self._budget_bytes

    def may_be_among_the_best(self, row: int, bound_s: float) -> bool:
        return bound_s < self._slowest_s[False] or (self._is_runnable[row] and bound_s < self._slowest_s[True])

    def _plan(self, row: int) -> Plan:
        return plan_of(self._values(row), self._splits)

    def _pricer(self, plan: Plan) -> PlanPricer:
        return PlanPricer(plan, *self._about)

    def _with_memory_named(self, candidate: Candidate) -> Candidate:
        """Who checkpoints is short of memory: that is what bounds the plan."""
        if candidate.plan.checkpointing and not (self._config.plan.fixed and self._config.plan.fixed.checkpointing):
            return replace(candidate, bottleneck="memory")
        return candidate

    def _larger(self, step_s: float) -> Candidate | None:
        """Of the faster plans that memory excludes the one that needs least, as far as they are looked at."""
        least_bytes, found, num_priced = np.inf, None, 0
        most_priced = _NUM_LARGER_OF_FEW if len(self._rows) <= _FEW_PLANS else _NUM_LARGER
        for least, row in sorted(self._misses)[:_MOST_MISSES]:
            if least >= least_bytes or num_priced == most_priced:
                break
            values = self._values(row)
            if self._mean_bound_s(row, values) >= step_s:
                continue
            num_priced += 1
            pricer = self._pricer(plan_of(values, self._splits))
            needed = self._needed_bytes(pricer, least_bytes)
            if needed < least_bytes and self._mean_s(pricer, row, values, lambda least_s: least_s < step_s):
                least_bytes, found = needed, pricer
        return None if found is None else found.candidate()

    def _needed_bytes(self, pricer: PlanPricer, enough: float = np.inf) -> float:
        """Of all batches; what is no less than `enough` need not be known to the byte."""
        needed = pricer.alone_bytes()
        for batch in range(self._num_batches):
            if needed >= enough:
                break
            needed = max(needed, *pricer.memory_bytes(batch).values())
        return needed

    def _mean_s(
        self, pricer: PlanPricer, row: int, values: dict[str, object], is_fast: Callable[[float], bool]
    ) -> float | None:
        """The mean step over the batches; None as soon as it is certain not to be fast."""
        known_s = self._batch_bounds_s(row, values).copy()  # then the steps themselves
        for batch in range(self._num_batches):
            known_s[batch] = pricer.step_s(batch)
            if not is_fast(known_s.mean()):
                return None
        return float(known_s.mean())

    def _batch_bounds_s(self, row: int, values: dict[str, object]) -> np.ndarray:
        """The step of each batch is no shorter, as the LLM's mean pipeline on it has it, [num_batches]."""
        key = (self._llm_place[row], self._pipelines.num_before(values))
        if key not in self._llm_each_s:
            self._llm_each_s[key] = self._pipelines.of_batches(values)
        return self._bounds.of_pipeline(row, *self._llm_each_s[key])

    def _mean_bound_s(self, row: int, values: dict[str, object]) -> float:
        """The mean step over the batches is no shorter, as the LLM's mean pipeline on the mean batch has it."""
        key = (self._llm_place[row], self._pipelines.num_before(values))
        if key not in self._llm_s:
            self._llm_s[key] = self._pipelines.of_batches(values, mean=True)
        (bound_s,) = self._bounds.of_pipeline(row, *self._llm_s[key])
        return float(bound_s)

    def _values(self, row: int) -> dict[str, object]:
        return dict(zip(self._columns, self._rows.row(row), strict=True))

    def _why_nothing_fits(self) -> str:
        needed, row = self._nearest()
        memory_gib = self._config.cluster.memory_gib
        needed_gib, most_gib = needed / 2**30, most_memory_gib(self._config.cluster)
        if needed_gib > most_gib:
            way = f"a {self._config.cluster.device_model} has {most_gib:g}: use more devices or larger ones"
        else:
            way = f"raise the memory to that ({more_than(memory_gib, needed_gib)}) or the number of devices"
        return (
            f"no plan fits into `cluster.memory_gib` = {memory_gib:g}: of {len(self._rows)} the nearest, "
            f"{self._plan(row)}, needs {_rounded_up(needed_gib):.4g} GiB a device; {way}, or lower "
            f"`train.global_batch_size` or `data.max_llm_tokens`{self._or_loosen_pins()}"
        )

    def _or_loosen_pins(self) -> str:
        pins = pins_of(self._config.plan.fixed) if self._config.plan.fixed else []
        return f", or loosen `plan.fixed` ({', '.join(pins)})" if pins else ""

    def _nearest(self) -> tuple[float, int]:
        """The bytes and the row of the plan that needs least: what was said of a miss is a bound, this is its need."""
        nearest = (np.inf, -1)
        for least, row in sorted(self._misses)[:_NUM_NEAREST]:
            if least >= nearest[0]:
                break
            needed = self._needed_bytes(self._pricer(self._plan(row)), nearest[0])
            if needed < nearest[0]:  # else it is not known to the byte
                nearest = needed, row
        return nearest


def more_than(limit: float, needed: float) -> str:
    """By how much a need exceeds a limit, in words."""
    return "less than 1% more" if needed < 1.01 * limit else f"{needed / limit - 1:.0%} more"


def _rounded_up(value: float) -> float:
    """To four digits: what a message names is enough."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / unit) * unit
