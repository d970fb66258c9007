"""Batches whose long samples are shared: how finely samples are divided is tried, and all are dealt so that they fit.

Of the ways that fit into memory, the fastest is searched further. Whether whole samples are faster is decided by the
scheduler.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dflop.schedule.assignment import Assignment
from dflop.schedule.memory_limit import fits
from dflop.schedule.pricer import Pricer
from dflop.schedule.sharing import FILLS, deal_shares, degrees_of
from dflop.schedule.step_search import StepSearch
from dflop.shapes import SampleShapes

__all__ = ["SharedBatch", "holds_with_shares", "with_shares"]

# How often a batch is dealt until it fits, and by how much less its buckets hold each time at least.
_MOST_DEALT, _LESS = 6, 0.95


class SharedBatch(NamedTuple):
    """A batch with a row for each share, its assignment, how it was found, and the number of faster ones that do not
    fit into memory."""

    shapes: SampleShapes
    assignment: Assignment
    how: str
    num_beyond_memory: int
    step_s: float


def with_shares(
    pricer: Pricer, shapes: SampleShapes, loads_s: np.ndarray, num_trials: int, seed: int
) -> SharedBatch | None:
    """The fastest batch with shares that was found; None where no sample is long, or nothing fits into memory.

    `loads_s` [num_samples, num_modules] are those of the plan's balancing problem; `num_trials` are those of the step
    search.
    """
    starts = _starts(pricer, shapes, loads_s)
    in_order = sorted((start for start in starts if np.isfinite(start.step_s)), key=lambda start: start.step_s)
    for number, start in enumerate(in_order):
        found, step_s = StepSearch(pricer, start.shapes).improve(start.assignment, num_trials, seed)
        if np.isfinite(step_s) and fits(pricer, start.shapes, found):
            how = f"{start.how}, search {step_s / start.step_s - 1:+.1%}" if num_trials else start.how
            return SharedBatch(start.shapes, found, how, number, step_s)
    return None


def holds_with_shares(pricer: Pricer, shapes: SampleShapes, loads_s: np.ndarray) -> bool:
    """Whether `with_shares` finds a batch: it takes one way that fits, and no search."""
    starts = _starts(pricer, shapes, loads_s)
    return any(np.isfinite(start.step_s) and fits(pricer, start.shapes, start.assignment) for start in starts)


def _starts(pricer: Pricer, shapes: SampleShapes, loads_s: np.ndarray) -> Iterator[SharedBatch]:
    """The batch dealt with each number of shares that is tried, the finest first; none where no sample is long."""
    plan, tried = pricer.plan, {}
    for fill in reversed(FILLS):
        degree = degrees_of(loads_s, shapes, plan.num_buckets, plan.grid("llm").cp, fill)
        tried[degree.tobytes()] = f"shares of {fill:g}", degree
    if any((degree > 1).any() for _, degree in tried.values()):
        for name, degree in tried.values():
            yield _dealt(pricer, shapes, degree, name)


def _dealt(pricer: Pricer, shapes: SampleShapes, degree: np.ndarray, name: str) -> SharedBatch:
    """The batch with `degree` shares of each sample, dealt so that it fits into memory, or needs as little as any way
    that was tried. Its step is infinite where a bucket would be empty."""
    assert pricer.divider is not None
    memory, llm, num_microbatches = pricer.memory, pricer.plan.grid("llm"), pricer.plan.num_microbatches
    divided = pricer.divider.divided(shapes, degree)
    loads_s = pricer.problem(divided).loads_s
    row_bytes = np.maximum(1.0, memory.bytes_of_rows(pricer.alone(divided)))
    nothing_bytes = memory.held_bytes(memory.resident_bytes).max()
    found, least_bytes, most_bytes = None, np.inf, np.inf
    for _ in range(_MOST_DEALT):
        dealt = deal_shares(loads_s, row_bytes, degree, llm, num_microbatches, most_bytes)
        assignment = pricer.assign(divided, *dealt)
        filled = np.bincount(
            np.ravel_multi_index(dealt, (llm.dp, num_microbatches)), row_bytes, pricer.plan.num_buckets
        )
        needed = max(pricer.memory_bytes(divided, assignment).values())
        if found is None or needed < least_bytes:
            step_s = pricer.step_s(divided, assignment) if filled.all() else np.inf
            found, least_bytes = SharedBatch(divided, assignment, name, 0, step_s), needed
        if needed <= memory.limit_bytes:
            break
        # What is needed beside the model grows about as the fullest bucket.
        fitting_bytes = filled.max() * (memory.limit_bytes - nothing_bytes) / (needed - nothing_bytes)
        most_bytes = min(fitting_bytes, _LESS * most_bytes)
    return found
