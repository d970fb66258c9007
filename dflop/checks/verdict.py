"""A verdict on a run of another trainer, by its log: what do shapes explain, what would balance save, what bounds it?

A step takes `a + sum(b * load)` seconds, where a load is that of the slowest rank if ranks are told apart, and of all
ranks together if not. Steps that take far longer than this are set aside first (compiling, saving, evaluating, a loader
that stalled): they hold most of a log's variance and nothing of it is the shapes'. Intervals are of 90 %, from a
bootstrap of blocks of steps. Where a log cannot tell, the verdict says so, and what would.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflop.balance.replicas import balanced_cells, cell_loads, waiting_loads
from dflop.base import UserError
from dflop.checks.step_logs import Batches, StepLog

__all__ = ["Share", "Verdict", "judge"]

# Nothing is said of shapes with fewer ordinary steps, or of a run whose steps are less often ordinary, or with loads
# that vary less.
_LEAST_STEPS, _LEAST_ORDINARY, _LEAST_VARIATION = 20, 0.75, 0.005
# Seconds that vary by a smaller share are constant.
_LEAST_SECONDS = 1e-6
# A step is set aside when it is so many deviations (as of a normal distribution) and this share beyond the others.
_FAR, _FAR_SHARE = 6.0, 0.05
# A wait of a smaller share is none; a device with work for a larger share of the time is what bounds the run.
_LEAST_WAIT, _IS_BUSY = 0.05, 0.9
_NUM_DRAWS = 400


@dataclass(frozen=True, slots=True)
class Share:
    """A share with its interval of 90 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_percent(self.value)} (90 %: {_percent(self.low)} to {_percent(self.high)})"


@dataclass(kw_only=True, slots=True)
class Verdict:
    """The shares that the log tells, None where it cannot, and a sentence on each question."""

    num_steps: int
    slow_steps: list[int]
    slow: float
    explained: Share | None = None
    saved: Share | None = None
    waiting: Share | None = None
    busy: Share | None = None
    sentences: list[str]

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def judge(log: StepLog, batches: Batches | None = None, *, padded: bool = False) -> Verdict:
    """The verdict on a log; `batches` are its steps' samples, and `padded` says that batches are padded.

    Raises:
        UserError: for padded batches whose samples have more than one load.
    """
    if padded and batches and len(batches.columns) > 1:
        raise UserError(f"--padded needs one column of loads, the length that is padded, not {len(batches.columns)}")
    loads, names = _loads_of(log, batches, padded)
    ordinary = _ordinary(log.seconds, loads)
    rng = np.random.default_rng(0)
    median_s = float(np.median(log.seconds[ordinary]))
    beyond_s = (log.seconds[~ordinary] - median_s).clip(0).sum()
    verdict = Verdict(
        num_steps=len(log.seconds),
        slow_steps=[int(step) for step in log.step[~ordinary]],
        slow=float(beyond_s / log.seconds.sum()),
        sentences=[f"{len(log.seconds)} steps of {log.source}, {median_s:.3g} s at the median"],
    )
    say = verdict.sentences.append
    if log.notes:
        say("of the log: " + "; ".join(log.notes))
    if verdict.slow_steps:
        number = len(verdict.slow_steps)
        listed = ", ".join(map(str, verdict.slow_steps[:8])) + (", …" if len(verdict.slow_steps) > 8 else "")
        say(
            f"{number} step{'s' if number > 1 else ''} set aside ({listed}), far beyond the others; their excess is "
            f"{_percent(verdict.slow)} of all time: compiling, saving, evaluating, or a loader that stalled"
        )
    say("shapes: " + _on_shapes(verdict, log, batches, loads, names, ordinary, rng))
    say("balance: " + _on_balance(verdict, log, batches, loads, ordinary, padded, rng))
    say("bound by: " + _on_bounds(verdict, log, rng))
    return verdict


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _loads_of(log: StepLog, batches: Batches | None, padded: bool) -> tuple[np.ndarray, list[str]]:
    """The loads that a step waits for, `[num_steps, num_columns]`, NaN where the samples of a step are not known."""
    if batches:
        rows = [_waited(batches, int(step), padded) for step in log.step]
        return np.array(rows), batches.columns
    found = np.empty((len(log.seconds), len(log.loads)))
    for column, (name, load) in enumerate(log.loads.items()):
        found[:, column] = log.rank_loads[name].max(axis=1) if name in log.rank_loads else load
    return found, list(log.loads)


def _waited(batches: Batches, step: int, padded: bool) -> np.ndarray:
    """The loads of a step's slowest ranks, of each column, microbatch by microbatch."""
    if step not in batches.costs:
        return np.full(len(batches.columns), np.nan)
    loads = cell_loads(batches.costs[step], batches.cells[step], batches.num_ranks, padded=padded)
    return loads.max(axis=1).sum(axis=0)


def _design(loads: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(loads)), loads])


def _ordinary(seconds: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """The steps that are not far slower than the others with such loads: by a fit of least absolute deviations."""
    usable = np.isfinite(loads).all(axis=1)
    known = _design(np.where(usable[:, None], loads, 0.0))
    known[~usable, 1:] = np.median(known[usable, 1:], axis=0) if usable.any() else 0.0
    scale = np.abs(known).max(axis=0)
    known = known / np.where(scale > 0, scale, 1.0)
    weights = np.ones(len(seconds))
    for _ in range(30):
        root = np.sqrt(weights)[:, None]
        fitted = known @ np.linalg.lstsq(known * root, seconds * root[:, 0], rcond=None)[0]
        weights = 1 / np.maximum(np.abs(seconds - fitted), 1e-6 * np.median(seconds))
    beyond = seconds - fitted
    deviation = 1.4826 * np.median(np.abs(beyond - np.median(beyond)))
    return beyond <= np.maximum(_FAR * deviation, _FAR_SHARE * np.median(seconds))


def _fit(seconds: np.ndarray, loads: np.ndarray) -> tuple[float, np.ndarray]:
    """The share of the variance that loads explain, adjusted for their number, and the seconds of a unit of each."""
    design = _design(loads)
    scale = np.abs(design).max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    found = np.linalg.lstsq(design / scale, seconds, rcond=None)[0]
    residual, total = seconds - design / scale @ found, seconds - seconds.mean()
    free = max(1, len(seconds) - loads.shape[1] - 1)
    explained = 1 - (residual @ residual / free) / max(total @ total / (len(seconds) - 1), 1e-300)
    return max(0.0, float(explained)), (found / scale)[1:]


def _share(number: int, of: Callable[[np.ndarray], float], rng: np.random.Generator) -> Share:
    """`of(steps)` on all of `number` steps, with its interval from draws of blocks of consecutive steps."""
    length = max(1, round(number ** (1 / 3)))
    first = rng.integers(0, number - length + 1, (_NUM_DRAWS, -(-number // length)))
    drawn = (first[:, :, None] + np.arange(length)).reshape(_NUM_DRAWS, -1)[:, :number]
    low, high = np.percentile([of(steps) for steps in drawn], (5, 95))
    return Share(of(np.arange(number)), float(low), float(high))


def _on_shapes(verdict, log, batches, loads, names, ordinary, rng) -> str:
    if not names:
        return "cannot be told from this log, which has none; --shapes names a table of the steps' samples"
    known = np.isfinite(loads).all(axis=1)
    if batches and not known.any():
        of_shapes = f"{min(batches.costs)} to {max(batches.costs)}"
        return f"cannot be told: --shapes has steps {of_shapes}, the log {log.step.min():.0f} to {log.step.max():.0f}"
    without = ""
    if batches and not known.all():
        without = (
            f"; {(~known).sum()} of {len(known)} steps of the log are not in --shapes, or not with all ranks and loads"
        )
    return _explained(verdict, log, loads, names, ordinary, known, rng) + without


def _explained(verdict, log, loads, names, ordinary, known, rng) -> str:
    steps = np.flatnonzero(ordinary & known)
    if len(steps) < _LEAST_STEPS:
        return f"cannot be told from {len(steps)} ordinary steps with shapes; {_LEAST_STEPS} are needed"
    if ordinary.mean() < _LEAST_ORDINARY:
        return f"cannot be told: {_percent((~ordinary).mean())} of the steps are far beyond the others"
    seconds, loads = log.seconds[steps], loads[steps]
    variation = loads.std(axis=0) / np.maximum(loads.mean(axis=0), 1e-300)
    if variation.max() < _LEAST_VARIATION:
        return f"cannot be told: {' and '.join(names)} vary by {_percent(variation.max(), 2)} from step to step"
    if seconds.std() < _LEAST_SECONDS * seconds.mean():
        return "cannot be told: all ordinary steps take the same time"
    verdict.explained = _share(len(steps), lambda drawn: _fit(seconds[drawn], loads[drawn])[0], rng)
    own = f"{_percent(seconds.std() / seconds.mean())} of a step"
    if verdict.explained.low < 0.02:
        return (
            f"{' and '.join(names)} explain {verdict.explained} of the variation between ordinary steps ({own}): not "
            "told apart from nothing"
        )
    return f"{' and '.join(names)} explain {verdict.explained} of the variation between ordinary steps ({own})"


def _on_balance(verdict, log, batches, loads, ordinary, padded, rng) -> str:
    if batches is None and not log.rank_loads:
        return (
            "cannot be told from this log, which has no loads of single ranks; --shapes names a table of the steps' "
            "samples with their ranks. Balance evens out ranks, not steps"
        )
    if verdict.explained is None or verdict.explained.low < 0.02:
        return "cannot be told, since the price of a load cannot"
    steps = np.flatnonzero(ordinary & np.isfinite(loads).all(axis=1))
    if batches is None:
        now = np.array([each.max(axis=1) for each in log.rank_loads.values()]).T[steps]
        even = np.array([each.mean(axis=1) for each in log.rank_loads.values()]).T[steps]
        most = "at most "
    else:
        if batches.num_ranks < 2:
            return "cannot be told: --shapes has one rank"
        now = loads[steps]
        even = np.array([_evened(batches, int(step), padded) for step in log.step[steps]])
        most = ""
    seconds = log.seconds[steps]

    def saved(drawn: np.ndarray) -> float:
        _, price_s = _fit(seconds[drawn], now[drawn])
        return float(((now - even)[drawn] @ price_s.clip(0)).sum() / seconds[drawn].sum())

    verdict.saved = _share(len(steps), saved, rng)
    how = "evened out perfectly" if batches is None else "dealt by `dflop.BalancedBatchSampler`"
    return f"the same samples, {how}, would save {most}{verdict.saved} of the time of ordinary steps"


def _evened(batches: Batches, step: int, padded: bool) -> np.ndarray:
    """The waited-for loads of a step when our sampler deals its samples; as they are where it does not apply."""
    costs, num_ranks = batches.costs[step], batches.num_ranks
    num_cells = (int(batches.cells[step].max()) // num_ranks + 1) * num_ranks
    if len(costs) % num_cells:
        return _waited(batches, step, padded)
    cell = balanced_cells(costs, num_ranks, len(costs) // num_cells, padded=padded)
    ours = cell_loads(costs, cell, num_ranks, padded=padded)
    theirs = cell_loads(costs, batches.cells[step], num_ranks, padded=padded)
    better = ours if waiting_loads(ours, "microbatch") <= waiting_loads(theirs, "microbatch") else theirs
    return better.max(axis=1).sum(axis=0)


def _on_bounds(verdict, log: StepLog, rng) -> str:
    def part(seconds: np.ndarray) -> Share:
        return _share(len(log.seconds), lambda drawn: float(seconds[drawn].sum() / log.seconds[drawn].sum()), rng)

    collective = ""
    if log.busy_s is not None:
        verdict.busy = part(log.busy_s)
        if log.collective_s is not None and log.collective_s.any():
            collective = f"; collectives run for {part(log.collective_s)} of it, waits for other ranks included"
    if log.data_s is None:
        slow = " A stalled loader would be among the steps set aside" if verdict.slow_steps else ""
        if verdict.busy and verdict.busy.low > _IS_BUSY:
            return f"the device, which has work for {verdict.busy} of the time{collective}"
        busy = f"; the device has work for {verdict.busy} of the time{collective}" if verdict.busy else ""
        return f"cannot be told from this log, which has no waits for data{busy}.{slow}"
    verdict.waiting = part(log.data_s)
    if verdict.waiting.low >= _LEAST_WAIT:
        return f"the loader: steps wait for data for {verdict.waiting} of the time"
    if verdict.waiting.high >= _LEAST_WAIT:
        return f"cannot be told for certain: steps wait for data for {verdict.waiting} of the time"
    not_loader = f"not the loader, which is waited for {verdict.waiting} of the time"
    if verdict.busy is None:
        return f"{not_loader}; what the device does meanwhile cannot be told from this log"
    if verdict.busy.low > _IS_BUSY:
        return f"the device, which has work for {verdict.busy} of the time{collective}"
    return f"the host: {not_loader}, and the device has work for {verdict.busy} of it{collective}"
