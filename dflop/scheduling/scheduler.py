"""The scheduler: one step's global batch, regrouped by a policy and kept if the simulator says so.

`random` draws buckets and `lpt` balances them. `search` takes the better of balanced buckets and of buckets that are
small where the pipeline fills and drains, and then changes what lengthens the simulated step. `ilp` lets CBC try before
that. A schedule holds all that a rank needs to load and compute its part.

A schedule depends on nothing but the seed, the step, the data, the plan, the costs and the pricer's corrections; with
`ilp` also on how far CBC gets within its time limit, unless `schedule.deterministic` limits CBC's work instead. Every
assignment is checked before it is taken, memory with all microbatches in flight.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import polars as pl

from dflop.balancing import (
    BatchProblem,
    CbcProcess,
    IlpResult,
    balanced_cells,
    check_assignment,
    lpt_buckets,
    quick_buckets,
    random_buckets,
    small_at_both_ends,
)
from dflop.config import ScheduleConfig
from dflop.data import SampleShapes
from dflop.pricing import Assignment, Pricer, fits, fitted
from dflop.runtime import UserError
from dflop.scheduling.global_batches import EvaluationBatches, GlobalBatches
from dflop.scheduling.shares import ideal_shares
from dflop.scheduling.step_schedule import StepSchedule, schedule_of
from dflop.scheduling.step_search import StepSearch
from dflop.store import LEFT_OUT_SCHEMA

__all__ = ["BatchScheduler"]

# Above as many, a search has fewer trials, so that 1,024 buckets are decided within a second.
MOST_BUCKETS = 256
# Of a run so many batches are looked at before it starts: 1 to 20 ms each.
MOST_CHECKED = 1000
# Where microbatches as unequal as they should be take too much memory: by how much less unequal others are.
FLATTER = (0.8, 0.6, 0.4, 0.2)
Packed = TypeVar("Packed")


class BatchScheduler:
    """`schedule(step)` for every step of a run. Close it (or use it as a context) to end the CBC process."""

    def __init__(
        self,
        samples: SampleShapes,
        pricer: Pricer,
        batches: GlobalBatches | EvaluationBatches,
        config: ScheduleConfig,
        seed: int,
        left_out: pl.DataFrame | None = None,
    ) -> None:
        """`left_out` (`LEFT_OUT_SCHEMA`) are the samples that are not among `samples` since no device holds them."""
        self.samples, self.pricer, self.batches, self._config, self._seed = samples, pricer, batches, config, seed
        self.left_out = LEFT_OUT_SCHEMA.to_frame() if left_out is None else left_out
        self._cbc: CbcProcess | None = None

    def schedule(self, step: int, policy: str | None = None) -> StepSchedule:
        """Decide one step, by the configured policy or the named one.

        Raises:
            UserError: when memory does not hold the batch.
        """
        return self._schedule(step, policy or self._config.policy, self._decide)

    def at_random(self, step: int) -> StepSchedule:
        """The step in random groups, to compare with: as they were drawn where memory holds none that are made to
        fit."""
        try:
            return self.schedule(step, "random")
        except UserError:
            return self._schedule(step, "random", self._beyond_memory)

    def _schedule(self, step: int, policy: str, decide: Callable[..., tuple[Assignment, str, int]]) -> StepSchedule:
        started = time.perf_counter()
        shapes = self.samples.take(self.batches[step])
        assignment, status, num_beyond_memory = decide(shapes, self.pricer.problem(shapes), step, policy)
        return schedule_of(
            self.pricer,
            shapes,
            assignment,
            step=step,
            policy=policy,
            status=status,
            num_beyond_memory=num_beyond_memory,
            deciding_s=time.perf_counter() - started,
        )

    def priced_by(self, pricer: Pricer) -> "BatchScheduler":
        """A scheduler of the same steps that follows another pricer of the plan, to be closed like this one."""
        other = copy.copy(self)
        other.pricer, other._cbc = pricer, None
        return other

    @property
    def num_trials(self) -> int:
        """Of a step's search: as configured, and fewer where there are so many buckets that each takes longer."""
        return int(self._config.search_trials * min(1.0, MOST_BUCKETS / self.pricer.plan.num_buckets))

    @cached_property
    def _shares(self) -> np.ndarray:
        return ideal_shares(self.pricer.corrected(), self.samples, self.batches.global_batch_size)

    def check(self, num_steps: int) -> None:
        """Raise `UserError` when a batch of a run's first thousand steps cannot be scheduled within the plan's buckets
        and memory."""
        for step in range(min(num_steps, MOST_CHECKED)):
            shapes = self.samples.take(self.batches[step])
            problem = self.pricer.problem(shapes)
            quick = quick_buckets(problem.loads_s, problem.num_buckets)
            if not fits(self.pricer, shapes, self._split(shapes, problem, quick)):
                self.schedule(step, "lpt")

    def close(self) -> None:
        if self._cbc is not None:
            self._cbc.close()
            self._cbc = None

    @contextmanager
    def open(self) -> Iterator["BatchScheduler"]:
        try:
            yield self
        finally:
            self.close()

    def _beyond_memory(
        self, shapes: SampleShapes, problem: BatchProblem, step: int, policy: str
    ) -> tuple[Assignment, str, int]:
        """Random groups as they are drawn, which memory does not hold."""
        _, drawn = self._drawn(shapes, problem, np.random.default_rng([self._seed, step]))
        return drawn, "random, beyond memory", 1

    def _drawn(
        self, shapes: SampleShapes, problem: BatchProblem, rng: np.random.Generator
    ) -> tuple[BatchProblem, Assignment]:
        """Random groups, and the problem that they solve."""
        problem, buckets = _packed(problem, lambda own: random_buckets(own, rng))
        return problem, self._split(shapes, problem, buckets)

    def _decide(
        self, shapes: SampleShapes, problem: BatchProblem, step: int, policy: str
    ) -> tuple[Assignment, str, int]:
        """The assignment, how it came about, and how many were not taken since memory would not hold them."""
        rng = np.random.default_rng([self._seed, step])
        if policy == "random":
            problem, drawn = self._drawn(shapes, problem, rng)
            if self._holds(shapes, problem, drawn):
                return drawn, "random", 0
            return fitted(self.pricer, shapes, [drawn], rng), "random, made to fit", 1
        shares = {"lpt": None} if policy == "lpt" else {"lpt": None, "small ends": self._shares}
        problem, packed = _packed(problem, lambda own: [lpt_buckets(own, share) for share in shares.values()])
        of_name = dict(zip(shares, packed, strict=True))
        starts = [own for name, buckets in of_name.items() for own in self._ordered(shapes, problem, buckets, name)]
        even = [] if policy == "lpt" else self._even_numbers(shapes, problem)
        if policy == "ilp":
            name = min(starts, key=lambda own: own.step_s).name
            solved = self._solve(problem, of_name[name], shares[name])
            starts += self._ordered(shapes, problem, solved.bucket, f"{name}, kept")
            starts, even = (
                [own._replace(name=_with_ilp(own.name, solved.status)) for own in some] for some in (starts, even)
            )
        starts += even
        fitting = self._fastest_that_fits(shapes, problem, starts)
        num_beyond = sum(fitting is None or own.step_s < fitting.step_s for own in starts)
        if policy in ("search", "ilp"):
            return *self._searched(shapes, problem, starts, fitting, rng), num_beyond
        if fitting is None:
            fastest = min(starts, key=lambda own: own.step_s)
            return fitted(self.pricer, shapes, [fastest.assignment], rng), f"{fastest.name}, made to fit", num_beyond
        return fitting.assignment, fitting.name, num_beyond

    def _searched(
        self,
        shapes: SampleShapes,
        problem: BatchProblem,
        starts: list["_Start"],
        fitting: "_Start | None",
        rng: np.random.Generator,
    ) -> tuple[Assignment, str]:
        """What the step search makes of the fastest start that fits, and how it came about.

        Where memory excludes the fastest of all, flatter packings are looked at. Where none fits, the search begins
        with the one that takes least, and brings it within memory.
        """
        if fitting is None or fitting.step_s > min(own.step_s for own in starts):
            starts = [*starts, *self._with_flatter_ends(shapes, problem)]
            fitting = self._fastest_that_fits(shapes, problem, starts)
        start = fitting or min(starts, key=lambda own: max(self.pricer.memory_bytes(shapes, own.assignment).values()))
        search = StepSearch(self.pricer, shapes)
        found, found_s = search.improve(start.assignment, self.num_trials, int(rng.integers(2**31)))
        if found_s == np.inf:
            return fitted(self.pricer, shapes, [start.assignment], rng), f"{start.name}, made to fit"
        assert self._holds(shapes, problem, found)
        return found, f"{start.name}, search {found_s / start.step_s - 1:+.1%}"

    def _even_numbers(self, shapes: SampleShapes, problem: BatchProblem) -> list["_Start"]:
        """Each microbatch balanced by itself, of as many samples on every replica: for replicas of the LLM that share
        parameters, and so meet in every microbatch."""
        dp, num_microbatches = self.pricer.plan.grid("llm").dp, problem.num_microbatches
        size, rest = divmod(len(shapes), dp * num_microbatches)
        if rest or not self.pricer.plan.grid("llm").gathers:
            return []
        microbatch, rank = np.divmod(balanced_cells(problem.loads_s, dp, size), dp)
        assignment = self._split(shapes, problem, rank * num_microbatches + microbatch)
        return [_Start(self.pricer.step_s(shapes, assignment), "even numbers", assignment)]

    def _with_flatter_ends(self, shapes: SampleShapes, problem: BatchProblem) -> list["_Start"]:
        """Packings between ideal shares and equal ones, the flatter the less the fullest device holds, until one
        fits."""
        starts = []
        for part in FLATTER:
            share = 1.0 + part * (self._shares - 1.0)
            problem, buckets = _packed(problem, lambda own, share=share: lpt_buckets(own, share))
            own = self._ordered(shapes, problem, buckets, f"small ends by {part:.0%}")
            starts += own
            if self._fastest_that_fits(shapes, problem, own):
                break
        return starts

    def _fastest_that_fits(
        self, shapes: SampleShapes, problem: BatchProblem, starts: list["_Start"]
    ) -> "_Start | None":
        for start in sorted(starts, key=lambda own: own.step_s):
            if self._holds(shapes, problem, start.assignment):
                return start
        return None

    def _solve(self, problem: BatchProblem, start: np.ndarray, share: np.ndarray | None) -> IlpResult:
        if self._cbc is None:
            self._cbc = CbcProcess()
        return self._cbc.solve(
            problem,
            start,
            time_limit_s=self._config.time_limit_s,
            share=share,
            counts_work=self._config.deterministic,
        )

    def _holds(self, shapes: SampleShapes, problem: BatchProblem, assignment: Assignment) -> bool:
        """Whether memory holds an assignment; that it is one at all is asserted."""
        uncapped = replace(problem, max_bucket_tokens=None)
        check_assignment(uncapped, assignment.llm_dp_rank * problem.num_microbatches + assignment.microbatch)
        return fits(self.pricer, shapes, assignment)

    def _ordered(self, shapes: SampleShapes, problem: BatchProblem, buckets: np.ndarray, name: str) -> list["_Start"]:
        """The orders of a packing's microbatches: as they come, or small ones at both ends."""
        orders = (np.arange(problem.num_microbatches), *_orders(problem, buckets))
        assignments = [self._split(shapes, problem, _reordered(problem, buckets, order)) for order in orders]
        return [_Start(self.pricer.step_s(shapes, own), name, own) for own in assignments]

    def _split(self, shapes: SampleShapes, problem: BatchProblem, buckets: np.ndarray) -> Assignment:
        llm_dp_rank, microbatch = np.divmod(buckets, problem.num_microbatches)
        return self.pricer.assign(shapes, llm_dp_rank, microbatch)


class _Start(NamedTuple):
    """An assignment, its step, and how it came about."""

    step_s: float
    name: str
    assignment: Assignment


def _with_ilp(name: str, status: str) -> str:
    """The name of a start beside an ILP that ended so; the ILP's own is `…, kept`."""
    packing, _, kept = name.partition(", ")
    return f"{packing}, ilp {status}{kept and ', kept'}"


def _packed(problem: BatchProblem, pack: Callable[[BatchProblem], Packed]) -> tuple[BatchProblem, Packed]:
    """The buckets, and the problem that they solve: without its token cap where no packing within that was found.

    The cap is an even part of memory, by which nobody is bound; what is, memory, is looked at afterwards.
    """
    try:
        return problem, pack(problem)
    except UserError:
        problem = replace(problem, max_bucket_tokens=None)
        return problem, pack(problem)


def _orders(problem: BatchProblem, buckets: np.ndarray) -> Iterator[np.ndarray]:
    """Orders in which fill and drain meet small microbatches: by all modules' load, and by each one's.

    `order[place]` is the microbatch that runs at that place.
    """
    num_microbatches = problem.num_microbatches
    per_microbatch = np.zeros((num_microbatches, problem.num_modules))
    np.add.at(per_microbatch, buckets % num_microbatches, problem.loads_s)
    for load in (per_microbatch.sum(axis=1), *per_microbatch.T):
        yield small_at_both_ends(load)


def _reordered(problem: BatchProblem, buckets: np.ndarray, order: np.ndarray) -> np.ndarray:
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    llm_dp_rank, microbatch = np.divmod(buckets, problem.num_microbatches)
    return llm_dp_rank * problem.num_microbatches + place[microbatch]
