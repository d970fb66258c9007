"""The search: the plan with the shortest expected step among all that fit into memory.

This is a best-first search. Every row of the space has a lower bound on its step time (`step_bounds`), and three
tighter ones that take longer to compute. The row with the lowest bound is always the next one. It gets its next tighter
bound and goes back into the queue; a row that has its tightest bound is priced by simulation, one batch after the
other, and is dropped as soon as enough others are certain to be faster. The search ends when the lowest bound in the
queue is no better than what was found. The result is then the argmin of the space, although most rows were never
simulated.
"""

import heapq
import math
from bisect import insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from dflop.balance import Policy
from dflop.base import UserError
from dflop.config import Config, PlanConfig, most_memory_gib
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.schedule import BYTES_PER_VALUE
from dflop.search.candidate import Candidate, PlanPricer
from dflop.search.encoder_bounds import DealtMedia
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.levels import without_recomputed
from dflop.search.link_bounds import LeastLinks
from dflop.search.memory_bounds import LeastMemory
from dflop.search.pins import without_each
from dflop.search.pipeline_bounds import LlmPipelines
from dflop.search.recompute import JustEnough
from dflop.search.row_bounds import MARGIN, Row, RowBounds
from dflop.search.space import Splits, enumerate_space, plan_of
from dflop.search.splits import balanced_splits
from dflop.search.step_bounds import LowerBounds, lower_bounds

__all__ = [
    "FINALISTS_PERCENT",
    "MORE_GIB",
    "NUM_FINALISTS",
    "WORTH_IT",
    "SearchResult",
    "llm_way",
    "more_than",
    "search_with",
]

# What more memory is worth is told for so much of it.
MORE_GIB = 10

# The search finds this many of the fastest plans for certain where users compare plans, and in spaces of at most
# `_FEW_PLANS`, where that takes no time. All find the plans among which `final_choice` chooses: of at most
# `NUM_FINALISTS` ways to train the LLM, with prices at most `FINALISTS_PERCENT` above that of the fastest. Schedules
# are up to 10 % shorter than prices, but not of all plans alike (`tests/benchmarks/regret.py`).
_NUM_COMPARED, _FEW_PLANS = 10, 20_000
NUM_FINALISTS, FINALISTS_PERCENT = 12, 3
# To tell the gain of more memory: of the plans that memory excludes, `_MOST_MISSES` are looked at and `_NUM_LARGER` of
# them priced. In small spaces `_NUM_LARGER_OF_FEW` are priced, so that the one that needs least is rarely missed.
_MOST_MISSES, _NUM_LARGER, _NUM_LARGER_OF_FEW = 4096, 64, 512
# How many times as fast a plan must be to be worth more memory.
WORTH_IT = 1.01
# Where no plan fits: for how many of those with the least bounds of memory the needed bytes are computed.
_NUM_NEAREST = 256
_PROGRESS_EVERY = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search.

    `candidates` are the plans priced on all batches, fastest first; the first is the fastest of the space.
    `least_bound_s` is the lowest bound of a plan that was not priced to the end: no plan of the space is faster than
    both that bound and the first candidate. `larger` is at least 1 % faster than all candidates, but needs more memory
    than there is; of such plans that were looked at, it needs least. `with_more` is the part of its step that the
    fastest plan would take with `MORE_GIB` more memory on each device and fewer recomputed layers; None if it
    recomputes none, its layers are pinned, or another search's plan was chosen.
    """

    candidates: list[Candidate]
    num_plans: int
    num_priced: int
    least_bound_s: float
    larger: Candidate | None
    with_more: float | None = None
    # Of plans with nearly equal prices, the one with the fastest scheduled batches (`final_choice`), and their number.
    chosen: Candidate | None = None
    num_finalists: int = 0
    # What does not fit of the batches of the first steps, where no plan was found that holds all (`final_choice`).
    trouble: str | None = None

    def merged(self, other: "SearchResult") -> "SearchResult":
        """The plans of both."""
        best = min(self, other, key=lambda found: found.candidates[0].step_s)
        return replace(
            best,
            candidates=sorted([*self.candidates, *other.candidates], key=lambda candidate: candidate.step_s),
            num_plans=self.num_plans + other.num_plans,
            num_priced=self.num_priced + other.num_priced,
            least_bound_s=min(self.least_bound_s, other.least_bound_s),
        )

    @property
    def best(self) -> Candidate:
        """The chosen plan: of those with nearly equal prices, the one whose scheduled batches are fastest."""
        return self.chosen or self.candidates[0]


def search_with(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    batches: GroupedBatches,
    progress: Callable[[int, int], None],
    *,
    policy: Policy,
    within: PlanConfig | None,
    splits_evenly: bool,
    compares: bool,
    cp: int,
    above: int | None,
    beside: SearchResult | None,
    offloads_optimizer: bool = False,
) -> SearchResult | None:
    """`search_plans` with one `cp`, of plans that all offload the optimiser's state or of others; None where no such
    plan is faster than what was found before (`beside`).

    Raises:
        UserError: when the space is empty or nothing fits.
    """
    splits = {} if splits_evenly else balanced_splits(config, spec, costs, batches)
    how = {"cp": cp, "above": above, "offloads_optimizer": offloads_optimizer}
    rows = enumerate_space(config, spec, costs.layouts, splits, within, **how)
    if rows.is_empty():
        return None
    links = LeastLinks(costs, spec, config.cluster, config.model.trained, BYTES_PER_VALUE[config.train.precision])
    bounds = lower_bounds(rows, batches.shapes, costs, spec, splits, links)
    fixed = (within or config.plan).fixed
    pinned = fixed.checkpointing if fixed else None
    num_certain = _NUM_COMPARED if compares or len(rows) <= _FEW_PLANS else 1
    search = _Search(config, spec, costs, batches, rows, splits, bounds, links, policy, num_certain, pinned)
    if beside:
        search.limit_s = search.threshold_s = beside.candidates[0].step_s
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
        tighter_s = search.look_at(row, level, bound_s)
        if tighter_s is not None:
            heapq.heappush(waiting, (tighter_s, level + 1, row))
    progress(len(order), len(order))
    if beside and not search.num_priced:
        return None
    return search.result(least_bound_s)


def llm_way(plan: Plan) -> Hashable:
    """How a plan trains the LLM, but for the layers that it recomputes or offloads."""
    grid = replace(plan.grid("llm"), recomputed=(), attention_kept=(), offloaded=())
    return plan.placement, plan.schedule, plan.num_chunks, plan.num_microbatches, grid


class _Search:
    """The state of a search: rows that do not fit, and the fastest plans."""

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
        policy: Policy,
        num_certain: int,
        pinned: bool | None,
    ) -> None:
        self._num_certain, self._pinned = num_certain, pinned
        self._config, self._spec, self._rows, self._splits = config, spec, rows, splits
        self._about = (config, spec, costs, batches, policy)
        self._num_batches = len(batches)
        self._budget_bytes = config.cluster.memory_gib * 2**30
        # Step times of the fastest plans, in order.
        self._fastest: list[float] = []
        # The step time of the fastest plan of each way to train the LLM.
        self._fastest_ways: dict[Hashable, float] = {}
        # The plans priced on all batches.
        self._priced: list[PlanPricer] = []
        # The least bytes of rows that do not fit, by the row's number and whether all layers are recomputed or none.
        self._misses: dict[tuple[int, bool], float] = {}
        trained = config.model.trained
        self._bounds = RowBounds(
            rows,
            splits,
            spec.module("llm").num_layers,
            bounds,
            LlmPipelines(config, spec, costs, batches, splits, links, policy),
            DealtMedia(spec, costs, batches, policy, trained),
            LeastMemory(spec, costs, batches, splits, policy, trained, links.value_bytes),
            limit_bytes=self._budget_bytes,
            pinned=pinned,
        )
        self._enough = JustEnough(spec, trained, self._budget_bytes)
        # A row with a bound above this is not among the plans that are wanted.
        self.threshold_s = self.limit_s = np.inf

    @property
    def num_priced(self) -> int:
        return len(self._priced)

    def look_at(self, number: int, level: int, bound_s: float) -> float | None:
        """The row's bound of the next level after `level`; None when the row is priced or dropped."""
        if level == 0:
            return self._without_memory(number, bound_s)
        return (self._by_mean_batch, self._by_batches, self._price)[level - 1](self._bounds.row(number), bound_s)

    def _without_memory(self, number: int, bound_s: float) -> float:
        """The bound as if any plan fitted. To find out what fits takes longer, and most rows are too slow anyway."""
        if self.threshold_s == np.inf:
            return bound_s  # and maybe nothing fits
        return max(bound_s, self._bounds.plain_mean_s(number))

    def _by_mean_batch(self, row: Row, bound_s: float) -> float | None:
        if not self._may_fit(row, self._bounds.llm_bytes):
            return None
        return max(bound_s, self._bounds.mean_s(row))

    def _by_batches(self, row: Row, bound_s: float) -> float | None:
        if not self._may_fit(row, self._bounds.device_bytes):
            return None
        return max(bound_s, float(self._bounds.batches_s(self._as_far_as_known(row)).mean()))

    def _price(self, row: Row, bound_s: float) -> None:
        row = self._as_far_as_known(row)

        def is_fast(bound_s: float) -> bool:
            return bound_s < self.threshold_s

        if not is_fast(self._bounds.dealt_s(row).mean()):
            return
        if len(row.choices) > 1 and (row.number, False) in self._misses:
            pricer = PlanPricer(self._bounds.least_plan(row, self._spec), *self._about)
        else:
            pricer = self._pricer(row, recomputes=row.choices[0])
        if (step_s := self._mean_s(pricer, row, is_fast)) is None:
            return  # with more layers recomputed it would take even longer
        if not self._fits(row, pricer):
            pricer = self._enough.of(pricer) if len(row.choices) > 1 else None
            if pricer is None or (step_s := self._mean_s(pricer, row, is_fast)) is None:
                return
        # Costs may be made by others, and have recomputed layers that take less time than kept ones.
        assert pricer.plan.checkpointing or step_s * MARGIN >= bound_s, (row, step_s, bound_s)
        self._priced.append(pricer)
        insort(self._fastest, step_s)
        way = llm_way(pricer.plan)
        self._fastest_ways[way] = min(step_s, self._fastest_ways.get(way, np.inf))
        self.threshold_s = min(self.limit_s, max(self._slowest_of(self._num_certain), self._slowest_finalist_s()))

    def _slowest_of(self, number: int) -> float:
        """The step of the slowest of this many plans; infinite where fewer are priced."""
        return self._fastest[number - 1] if len(self._fastest) >= number else np.inf

    def _slowest_finalist_s(self) -> float:
        most_s = (1 + FINALISTS_PERCENT / 100) * self._fastest[0]
        return min(most_s, *sorted(self._fastest_ways.values())[NUM_FINALISTS - 1 :][:1], np.inf)

    def result(self, least_bound_s: float) -> SearchResult:
        if not self._priced:
            raise UserError(self._why_nothing_fits())
        candidates = [pricer.candidate() for pricer in self._priced]
        candidates.sort(key=lambda candidate: (candidate.step_s, max(candidate.memory_bytes.values())))
        return SearchResult(
            candidates=[self._with_memory_named(candidate) for candidate in candidates],
            num_plans=len(self._rows),
            num_priced=len(self._priced),
            least_bound_s=least_bound_s,
            larger=self._larger(candidates[0]),
            with_more=self._with_more(candidates[0]),
        )

    def _may_fit(self, row: Row, least_bytes: Callable[[Row, bool], float]) -> bool:
        """Whether a row may still fit, by its least bytes with all layers recomputed or with none."""
        for recomputes in row.choices:
            if (row.number, recomputes) in self._misses:
                continue
            needed = least_bytes(row, recomputes) / MARGIN
            if needed <= self._budget_bytes:
                return True
            self._misses[row.number, recomputes] = needed
        return False

    def _fits(self, row: Row, pricer: PlanPricer) -> bool:
        """Whether the row's first choice fits."""
        key = row.number, row.choices[0]
        if key not in self._misses and (needed := pricer.needed_bytes()) > self._budget_bytes:
            self._misses[key] = needed
        return key not in self._misses

    def _as_far_as_known(self, row: Row) -> Row:
        """The row with the layers that have to be recomputed, if its plan without recomputed layers does not fit."""
        if len(row.choices) > 1 and (row.number, False) in self._misses:
            return self._bounds.recomputing(row)
        return row

    def _pricer(self, row: Row, *, recomputes: bool) -> PlanPricer:
        return PlanPricer(plan_of(row.values, self._splits, checkpointing=recomputes), *self._about)

    def _with_memory_named(self, candidate: Candidate) -> Candidate:
        """The candidate; memory is its bottleneck if it recomputes layers that are not pinned."""
        if candidate.plan.checkpointing and self._pinned is None:
            return replace(candidate, bottleneck="memory")
        return candidate

    def _larger(self, fastest: Candidate) -> Candidate | None:
        """The plan with the least bytes that would be 1 % faster if it fitted; None if there is none.

        Looked at are the fastest plan with fewer recomputed layers, and the rows nearest to fitting, which recompute
        none or all of their layers."""
        step_s, num_priced = fastest.step_s / WORTH_IT, 0
        fewer = self._enough.fewer(PlanPricer(fastest.plan, *self._about)) if fastest.plan.checkpointing else ()
        found = next((pricer for pricer in fewer if pricer.mean_step_s() < step_s), None)
        least_bytes = np.inf if found is None else found.needed_bytes()
        most_priced = _NUM_LARGER_OF_FEW if len(self._rows) <= _FEW_PLANS else _NUM_LARGER
        for least, number, recomputes in self._nearest_misses()[:_MOST_MISSES]:
            if least >= least_bytes or num_priced == most_priced:
                break
            row = self._bounds.row(number).with_all(recomputes)
            if self._bounds.mean_s(row) >= step_s:
                continue
            num_priced += 1
            pricer = self._pricer(row, recomputes=recomputes)
            needed = pricer.needed_bytes(least_bytes)
            if needed < least_bytes and self._mean_s(pricer, row, lambda least_s: least_s < step_s):
                least_bytes, found = needed, pricer
        return None if found is None else found.candidate()

    def _with_more(self, fastest: Candidate) -> float | None:
        """`SearchResult.with_more`."""
        if not fastest.plan.checkpointing or self._pinned is not None:
            return None
        pricer = PlanPricer(without_recomputed(fastest.plan), *self._about)
        limit_bytes = self._budget_bytes + MORE_GIB * 2**30
        if pricer.needed_bytes(np.nextafter(limit_bytes, np.inf)) > limit_bytes:
            pricer = JustEnough(self._spec, self._config.model.trained, limit_bytes).of(pricer)
        return None if pricer is None else pricer.mean_step_s() / fastest.step_s

    def _nearest_misses(self) -> list[tuple[float, int, bool]]:
        """The rows that memory excludes: (least bytes, row, whether all layers are recomputed), least bytes first."""
        return sorted((needed, number, recomputes) for (number, recomputes), needed in self._misses.items())

    def _mean_s(self, pricer: PlanPricer, row: Row, is_fast: Callable[[float], bool]) -> float | None:
        """The mean step time over the batches; None as soon as it is certain that `is_fast` does not hold for it."""
        known_s = self._bounds.dealt_s(row).copy()  # bounds, which are replaced by step times one by one
        for batch in range(self._num_batches):
            known_s[batch] = pricer.step_s(batch)
            if not is_fast(known_s.mean()):
                return None
        return float(known_s.mean())

    def _why_nothing_fits(self) -> str:
        needed, plan = self._nearest()
        memory_gib = self._config.cluster.memory_gib
        needed_gib, most_gib = needed / 2**30, most_memory_gib(self._config.cluster)
        if needed_gib > most_gib:
            way = f"a {self._config.cluster.device_model} has {most_gib:g}: use more devices or larger ones"
        else:
            way = f"raise the memory to that ({more_than(memory_gib, needed_gib)}) or the number of devices"
        return (
            f"no plan fits into `cluster.memory_gib` = {memory_gib:g}: of {len(self._rows)} the nearest, "
            f"{plan}, needs {_rounded_up(needed_gib):.4g} GiB a device; {way}, or lower "
            f"`train.global_batch_size` or `data.max_llm_tokens`{self._or_loosen_pins()}"
        )

    def _or_loosen_pins(self) -> str:
        pins = without_each(self._config.plan.fixed) if self._config.plan.fixed else []
        return f", or loosen `plan.fixed` ({', '.join(pins)})" if pins else ""

    def _nearest(self) -> tuple[float, Plan]:
        """The bytes that the plan with the least need of memory really needs, beyond the bounds; and that plan."""
        nearest: tuple[float, Plan | None] = (np.inf, None)
        for least, number, recomputes in self._nearest_misses()[:_NUM_NEAREST]:
            if least >= nearest[0]:
                break
            pricer = self._pricer(self._bounds.row(number), recomputes=recomputes)
            needed = pricer.needed_bytes(nearest[0])
            if needed < nearest[0]:  # otherwise `needed` may be a lower bound only
                nearest = needed, pricer.plan
        return nearest


def more_than(limit: float, needed: float) -> str:
    """By how much a need exceeds a limit, as text."""
    return "less than 1% more" if needed < 1.01 * limit else f"{needed / limit - 1:.0%} more"


def _rounded_up(value: float) -> float:
    """The value rounded up to four digits, so that the number in a message is enough."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / unit) * unit
