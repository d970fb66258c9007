"""The scheduler: it regroups one step's global batch by a policy, and chooses by simulated step times.

A policy (`balance/policies`) gives one or more packings; the scheduler runs their microbatches in several orders, if
the policy allows it, and takes the fastest that fits into memory. For some policies CBC improves the packing first, and
a search changes it as long as the simulated step gets shorter. A schedule holds all that a rank needs to load and
compute its part.

A schedule depends only on the seed, the step, the data, the plan, the costs and the pricer's corrections. With `ilp` it
also depends on how far CBC gets within its time limit, unless `schedule.deterministic` limits CBC's work instead. Every
assignment is checked before it is taken, including its memory with all microbatches in flight.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import polars as pl

from dflop.balance import (
    LPT,
    POLICIES,
    RANDOM,
    BatchProblem,
    CbcProcess,
    IlpResult,
    Policy,
    balanced_cells,
    bucket_loads,
    check_assignment,
    drawn_in_turns,
    lpt_buckets,
    quick_buckets,
    small_at_both_ends,
)
from dflop.base import UserError
from dflop.config import ScheduleConfig
from dflop.schedule.assignment import Assignment
from dflop.schedule.global_batches import EvaluationBatches, GlobalBatches
from dflop.schedule.memory_limit import MOST_LEFT_OUT, fits, fitted, require_each_fits
from dflop.schedule.microbatch_sizes import ideal_shares
from dflop.schedule.pricer import Pricer
from dflop.schedule.shared_batches import holds_with_shares, with_shares
from dflop.schedule.step_schedule import StepSchedule, schedule_of
from dflop.schedule.step_search import StepSearch
from dflop.shapes import SampleShapes
from dflop.store import LEFT_OUT_SCHEMA

__all__ = ["BatchScheduler"]

# Above this number of buckets, a search has fewer trials, so that 1,024 buckets are decided within a second.
MOST_BUCKETS = 256
# Where GPUs train, a run's search goes on for up to so many rounds of as many trials, while the last one made the step
# shorter by `_LEAST_GAIN`, and while all trials together take no more than `_SHARE_OF_STEP` of the predicted step.
_MOST_ROUNDS, _LEAST_GAIN, _SHARE_OF_STEP = 20, 5e-4, 0.25
# The number of a run's batches that are checked before it starts, at 1 to 20 ms each.
MOST_CHECKED = 1000
# Of these, how many are checked where replicas share samples, which takes longer.
_MOST_FULLEST = 50
# Where microbatches of the ideal, unequal sizes need too much memory: shares of the inequality that are tried instead.
FLATTER = (0.8, 0.6, 0.4, 0.2)
_NO_START_FITS = "no start of the batch fits into memory"
Packed = TypeVar("Packed")


class BatchScheduler:
    """`schedule(step)` for every step of a run. Close it, or use it with `open()`, to end the CBC process."""

    def __init__(
        self,
        samples: SampleShapes,
        pricer: Pricer,
        batches: GlobalBatches | EvaluationBatches,
        config: ScheduleConfig,
        seed: int,
        left_out: pl.DataFrame | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """`left_out` (`LEFT_OUT_SCHEMA`) are the samples that are not in `samples` because no device can hold them.

        With `goes_on`, searches go on while they gain, if devices compute and this core has nothing else to do.
        """
        self.samples, self.pricer, self.batches, self._config, self._seed = samples, pricer, batches, config, seed
        self.left_out = LEFT_OUT_SCHEMA.to_frame() if left_out is None else left_out
        self._goes_on = goes_on
        self._cbc: CbcProcess | None = None

    def schedule(self, step: int, policy: str | None = None) -> StepSchedule:
        """Schedule one step, by the configured policy or by `policy`.

        Raises:
            UserError: when no assignment of the batch is found that fits into memory.
        """
        return self._schedule(step, policy, self._decide)

    def schedule_what_fits(self, step: int, policy: str | None = None) -> StepSchedule:
        """As `schedule`, for a run that is under way: where no assignment of the whole batch is found that fits into
        memory, the samples that keep most bytes are left out. 1, 2, 4, … are tried, and at last a tenth of the batch.

        Raises:
            UserError: when that is not enough.
        """
        try:
            return self.schedule(step, policy)
        except UserError:
            size = len(self.batches[step])
            most = min(max(1, int(MOST_LEFT_OUT * size)), size - self.pricer.plan.num_buckets)
            for count in (*(2**power for power in range(most.bit_length()) if 2**power < most), most):
                with contextlib.suppress(UserError):
                    return self._schedule(step, policy, self._decide, count)
            raise

    def at_random(self, step: int, num_left_out: int = 0) -> StepSchedule:
        """The step in random groups, for comparison: as they are drawn, whether they fit into memory or not, without so
        many of the fullest samples."""
        return self._schedule(step, RANDOM.name, self._as_drawn, num_left_out)

    def _schedule(
        self,
        step: int,
        policy_name: str | None,
        decide: Callable[..., tuple[Assignment, str, int]],
        num_left_out: int = 0,
    ) -> StepSchedule:
        """The step without the samples of its batch that keep most bytes, so many of them."""
        started, policy = time.perf_counter(), POLICIES[policy_name or self._config.policy]
        shapes = self.samples.take(self.batches[step])
        if num_left_out:
            row_bytes = self.pricer.memory.bytes_of_rows(self.pricer.alone(shapes))
            kept = np.argsort(-row_bytes, kind="stable")[num_left_out:]
            shapes = shapes.take(np.sort(kept))
        decided = self._shared(shapes, step, policy) if policy.may_reorder else None
        if decided is None:
            decided = shapes, *decide(shapes, self.pricer.problem(shapes), step, policy)
        shapes, assignment, status, num_beyond_memory = decided
        return schedule_of(
            self.pricer,
            shapes,
            assignment,
            step=step,
            policy=policy.name,
            status=status,
            num_beyond_memory=num_beyond_memory,
            num_left_out=num_left_out,
            deciding_s=time.perf_counter() - started,
        )

    def _shared(
        self, shapes: SampleShapes, step: int, policy: Policy
    ) -> tuple[SampleShapes, Assignment, str, int] | None:
        """The batch with its long samples shared or whole, whichever is faster, and as `_decide`; None where the plan
        shares none, no sample is long, or nothing that was tried fits into memory. Whole samples are not made to fit
        where shared ones do."""
        if self.pricer.divider is None:
            return None
        problem = self.pricer.problem(shapes)
        seed = int(np.random.default_rng([self._seed, step]).integers(2**31))
        num_trials = self.num_trials if policy.searches else 0
        shared = with_shares(self.pricer, shapes, problem.loads_s, num_trials, seed)
        if shared is None or problem.loads_s.max() >= shared.step_s:  # the longest sample alone takes longer
            return shared and shared[:4]
        try:
            whole = self._decide(shapes, problem, step, policy, makes_fit=False)
        except UserError:  # whole samples do not fit
            return shared[:4]
        return shared[:4] if shared.step_s < self.pricer.step_s(shapes, whole[0]) else (shapes, *whole)

    def priced_by(self, pricer: Pricer) -> "BatchScheduler":
        """A scheduler of the same steps with another pricer of the plan. It has to be closed like this one."""
        other = copy.copy(self)
        other.pricer, other._cbc = pricer, None
        return other

    @property
    def num_trials(self) -> int:
        """Trials of a step's search: as configured, but fewer above `MOST_BUCKETS`, where each trial takes longer."""
        return int(self._config.search_trials * min(1.0, MOST_BUCKETS / self.pricer.plan.num_buckets))

    @cached_property
    def _shares(self) -> np.ndarray:
        return ideal_shares(self.pricer.corrected(), self.samples, self.batches.global_batch_size)

    def check(self, num_steps: int, most_fullest: int | None = None, *, searches: bool = True) -> None:
        """Check that the batches of the first `num_steps` steps, and of a thousand at most, can be scheduled, those
        that keep most bytes first; with `most_fullest`, only so many of them. Where replicas share samples, these are
        50. Without `searches`, simple ways to group a batch have to be enough.

        Raises:
            UserError: when a batch cannot fill the plan's buckets or does not fit into memory.
        """
        num_steps = min(num_steps, MOST_CHECKED)
        count = most_fullest or (num_steps if self.pricer.divider is None else _MOST_FULLEST)
        for step in self.fullest(num_steps, count):
            shapes = self.samples.take(self.batches[step])
            problem = self.pricer.problem(shapes)
            if self._holds_quickly(shapes, problem):
                continue
            try:
                self._decide(shapes, problem, step, LPT)
            except UserError:
                if not searches:
                    raise
                self.schedule(step)

    def holds_quickly(self, steps: Iterable[int]) -> bool:
        """Whether the batches of these steps fit into memory without much looking for how."""
        batches = (self.samples.take(self.batches[step]) for step in steps)
        return all(self._holds_quickly(shapes, self.pricer.problem(shapes)) for shapes in batches)

    def _holds_quickly(self, shapes: SampleShapes, problem: BatchProblem) -> bool:
        """Whether a batch fits into memory with its long samples shared, or in quick groups."""
        if self.pricer.divider is not None and holds_with_shares(self.pricer, shapes, problem.loads_s):
            return True
        quick = quick_buckets(problem.loads_s, problem.num_buckets)
        return fits(self.pricer, shapes, self._split(shapes, problem, quick))

    def fullest(self, num_steps: int, count: int) -> list[int]:
        """Of the first steps, those whose batches keep most bytes on all devices together, the fullest first."""
        drawn = [self.batches[step] for step in range(num_steps)]
        rows, places = np.unique(np.concatenate(drawn), return_inverse=True)  # of a large data set a small part
        row_bytes = self.pricer.memory.bytes_of_rows(self.pricer.alone(self.samples.take(rows)))
        of_steps = np.array([own.sum() for own in np.split(row_bytes[places], np.cumsum(list(map(len, drawn)))[:-1])])
        return np.argsort(-of_steps, kind="stable")[:count].tolist()

    def close(self) -> None:
        """End the CBC process, if there is one."""
        if self._cbc is not None:
            self._cbc.close()
            self._cbc = None

    @contextlib.contextmanager
    def open(self) -> Iterator["BatchScheduler"]:
        """A context with this scheduler, which is closed at its end."""
        try:
            yield self
        finally:
            self.close()

    def _as_drawn(
        self, shapes: SampleShapes, problem: BatchProblem, step: int, policy: Policy
    ) -> tuple[Assignment, str, int]:
        """A policy's groups as they are, whether they fit into memory or not."""
        rng = np.random.default_rng([self._seed, step])
        problem, buckets = _packed(problem, lambda unpacked: policy.buckets(unpacked, rng))
        drawn = self._split(shapes, problem, buckets)
        if self._holds(shapes, problem, drawn):
            return drawn, policy.name, 0
        return drawn, f"{policy.name}, beyond memory", 1

    def _decide(
        self, shapes: SampleShapes, problem: BatchProblem, step: int, policy: Policy, *, makes_fit: bool = True
    ) -> tuple[Assignment, str, int]:
        """The assignment, how it was found, and the number of faster ones that were not taken because of memory.

        Raises:
            UserError: where no start fits into memory, or with `makes_fit`, can be made to fit.
        """
        if self.pricer.divider is not None:  # there may be samples that no device holds whole
            require_each_fits(self.pricer, shapes)
        rng = np.random.default_rng([self._seed, step])
        problem, packings = _packed(problem, lambda unpacked: policy.packings(unpacked, rng, lambda: self._shares))
        place = self._ordered if policy.may_reorder else self._as_packed
        starts = [start for name, packing in packings.items() for start in place(shapes, problem, packing.bucket, name)]
        others = [self._as_priced(shapes, policy, step)] if policy.may_reorder else []
        others += self._for_shared_parameters(shapes, problem) if policy.searches else []
        if policy.solves:
            name = min(starts, key=lambda start: start.step_s).name
            solved = self._solve(problem, *packings[name])
            starts += self._ordered(shapes, problem, solved.bucket, f"{name}, kept")
            starts, others = (
                [start._replace(name=_with_ilp(start.name, solved.status)) for start in some]
                for some in (starts, others)
            )
        starts += others
        fitting = self._fastest_that_fits(shapes, problem, starts)
        num_beyond = sum(fitting is None or start.step_s < fitting.step_s for start in starts)
        if policy.searches:
            return *self._searched(shapes, problem, starts, fitting, rng, makes_fit=makes_fit), num_beyond
        if fitting is None:
            if not makes_fit:
                raise UserError(_NO_START_FITS)
            fastest = min(starts, key=lambda start: start.step_s)
            return fitted(self.pricer, shapes, [fastest.assignment], rng), f"{fastest.name}, made to fit", num_beyond
        return fitting.assignment, fitting.name, num_beyond

    def _searched(
        self,
        shapes: SampleShapes,
        problem: BatchProblem,
        starts: list["_Start"],
        fitting: "_Start | None",
        rng: np.random.Generator,
        *,
        makes_fit: bool,
    ) -> tuple[Assignment, str]:
        """The result of the step search from the fastest start that fits, and how it was found.

        Where the fastest start of all does not fit into memory, packings with less unequal microbatches are tried, too.
        Where no start fits, the search begins with the one that needs least memory, and brings it within the limit.
        """
        if fitting is None or fitting.step_s > min(start.step_s for start in starts):
            starts = [*starts, *self._with_flatter_ends(shapes, problem)]
            fitting = self._fastest_that_fits(shapes, problem, starts)
        if fitting is None and not makes_fit:
            raise UserError(_NO_START_FITS)
        start = fitting or min(
            starts, key=lambda start: max(self.pricer.memory_bytes(shapes, start.assignment).values())
        )
        search = StepSearch(self.pricer, shapes)
        found, found_s = search.improve(start.assignment, self.num_trials, int(rng.integers(2**31)))
        for _ in range(1, self._num_rounds(search, found_s)):
            before_s = found_s
            found, found_s = search.improve(found, self.num_trials, int(rng.integers(2**31)))
            if found_s > before_s * (1 - _LEAST_GAIN):
                break
        if found_s == np.inf:
            return fitted(self.pricer, shapes, [start.assignment], rng), f"{start.name}, made to fit"
        assert self._holds(shapes, problem, found)
        return found, f"{start.name}, search {found_s / start.step_s - 1:+.1%}"

    def _num_rounds(self, search: StepSearch, step_s: float) -> int:
        """How many rounds of trials a step of `step_s` seconds leaves time for; it depends on no clock."""
        if not (self._goes_on and self.pricer.on_gpus and self.num_trials and np.isfinite(step_s)):
            return 1
        return min(_MOST_ROUNDS, int(_SHARE_OF_STEP * step_s / (self.num_trials * search.trial_s)))

    def _as_priced(self, shapes: SampleShapes, policy: Policy, step: int) -> "_Start":
        """The batch as it is grouped to price plans. Where it fits into memory, no schedule takes longer."""
        drawn, plan = self.pricer.drawn(shapes, [self._seed, step]), self.pricer.plan
        return self._start(shapes, "as priced", *policy.quick(drawn, plan.grid("llm").dp, plan.num_microbatches))

    def _for_shared_parameters(self, shapes: SampleShapes, problem: BatchProblem) -> list["_Start"]:
        """Starts for LLM replicas that share parameters, and so wait for each other in every microbatch; else none.

        Buckets of about the same load share a microbatch. They are balanced over all modules, or for the LLM alone:
        media may be encoded elsewhere. In another start all buckets have equally many samples, if that is possible.
        """
        dp, num_microbatches = self.pricer.plan.grid("llm").dp, problem.num_microbatches
        if not self.pricer.plan.grid("llm").gathers:
            return []
        # Kernels are compiled for contiguous arrays.
        starts, llm_s = [], np.ascontiguousarray(problem.loads_s[:, -1:])
        for name, columns in {"in turns": problem.loads_s, "in turns by llm": llm_s}.items():
            packed, bucket = _packed(replace(problem, loads_s=columns), lpt_buckets)
            load = bucket_loads(packed, bucket).sum(axis=1)
            starts.append(self._start(shapes, name, *drawn_in_turns(bucket, load, dp)))
        size, rest = divmod(len(shapes), dp * num_microbatches)
        if not rest:
            microbatch, rank = np.divmod(balanced_cells(problem.loads_s, dp, size), dp)
            starts.append(self._start(shapes, "even numbers", rank, microbatch))
        return starts

    def _start(self, shapes: SampleShapes, name: str, llm_dp_rank: np.ndarray, microbatch: np.ndarray) -> "_Start":
        assignment = self.pricer.assign(shapes, llm_dp_rank, microbatch)
        return _Start(self.pricer.step_s(shapes, assignment), name, assignment)

    def _with_flatter_ends(self, shapes: SampleShapes, problem: BatchProblem) -> list["_Start"]:
        """Packings between ideal and equal shares, ever closer to equal ones, until one fits into memory."""
        starts = []
        for part in FLATTER:
            share = 1.0 + part * (self._shares - 1.0)
            problem, buckets = _packed(problem, lambda unpacked, share=share: lpt_buckets(unpacked, share))
            ordered = self._ordered(shapes, problem, buckets, f"small ends by {part:.0%}")
            starts += ordered
            if self._fastest_that_fits(shapes, problem, ordered):
                break
        return starts

    def _fastest_that_fits(
        self, shapes: SampleShapes, problem: BatchProblem, starts: list["_Start"]
    ) -> "_Start | None":
        for start in sorted(starts, key=lambda start: start.step_s):
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
        """Whether an assignment fits into memory; an invalid assignment raises ValueError."""
        uncapped = replace(problem, max_bucket_tokens=None)
        check_assignment(uncapped, assignment.llm_dp_rank * problem.num_microbatches + assignment.microbatch)
        return fits(self.pricer, shapes, assignment)

    def _as_packed(self, shapes: SampleShapes, problem: BatchProblem, buckets: np.ndarray, name: str) -> list["_Start"]:
        """The one start of a packing whose microbatches keep their order."""
        assignment = self._split(shapes, problem, buckets)
        return [_Start(self.pricer.step_s(shapes, assignment), name, assignment)]

    def _ordered(self, shapes: SampleShapes, problem: BatchProblem, buckets: np.ndarray, name: str) -> list["_Start"]:
        """A start for each order of a packing's microbatches: as they come, or with small ones at both ends."""
        orders = (np.arange(problem.num_microbatches), *_orders(problem, buckets))
        assignments = [self._split(shapes, problem, _reordered(problem, buckets, order)) for order in orders]
        return [_Start(self.pricer.step_s(shapes, assignment), name, assignment) for assignment in assignments]

    def _split(self, shapes: SampleShapes, problem: BatchProblem, buckets: np.ndarray) -> Assignment:
        llm_dp_rank, microbatch = np.divmod(buckets, problem.num_microbatches)
        return self.pricer.assign(shapes, llm_dp_rank, microbatch)


class _Start(NamedTuple):
    """An assignment, its step time, and how it was found."""

    step_s: float
    name: str
    assignment: Assignment


def _with_ilp(name: str, status: str) -> str:
    """The name of a start with the status of the ILP added; the name of the ILP's own result ends in `, kept`."""
    packing, _, kept = name.partition(", ")
    return f"{packing}, ilp {status}{kept and ', kept'}"


def _packed(problem: BatchProblem, pack: Callable[[BatchProblem], Packed]) -> tuple[BatchProblem, Packed]:
    """The packing, and the problem that it solves: without the token limit where no packing within it was found.

    The token limit is what memory allows when all buckets are full alike, so it is no strict limit. Whether the
    assignment fits into memory is checked afterwards.
    """
    try:
        return problem, pack(problem)
    except UserError:
        problem = replace(problem, max_bucket_tokens=None)
        return problem, pack(problem)


def _orders(problem: BatchProblem, buckets: np.ndarray) -> Iterator[np.ndarray]:
    """Orders with small microbatches first and last, where the pipeline fills and drains: by all modules' load, and by
    each module's.

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
