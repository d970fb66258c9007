"""Corrections of the cost table, learned from measured microbatches.

Microbatches of similar shape share a bin. For each bin and pass one factor is learned: how much longer they take than
the table says. `Learner` learns the factors from measured seconds; `Corrections` holds them as they were after some
step, and pricing multiplies every stage time by them. Nothing here uses a clock or a file; `correction_loop` decides
when to measure.

A bin is an octave of the module's main load (items of an encoder, tokens of the LLM) and also one of the mean segment,
sum_sq_tokens over that load, which is 0 where an encoder's items are all of one size. Throughput depends on both: small
microbatches are slow per item, and long segments are slow because of attention. An octave is wide enough to be met
every few steps, and narrow enough that the table's own slope holds within it. All stages of a module share its factors.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dflop.base.kernels import kernel
from dflop.costs import Loads

__all__ = [
    "NO_CORRECTIONS",
    "PASSES",
    "BinKey",
    "Corrections",
    "HeldOut",
    "LearnedBin",
    "Learner",
    "bin_of",
    "bins_of",
    "is_stale",
    "stale_share",
]

PASSES = ("forward", "backward")
NUM_LOAD_BINS, NUM_SEGMENT_BINS = 32, 24

# The weight of the newest step's ratio in the moving average.
_WEIGHT = 0.3
# A bin's factor is used once the bin has occurred in this many microbatches, and in `_NUM_RECENT` steps.
_MIN_CELLS = 6
# The moving average is fed with a trimmed mean: that of this many last steps, without the smallest and the largest. So
# one odd step changes nothing, but long times that occur often still count, as in a step time (a median drops them).
_NUM_RECENT = 5
# Factors within 3 % of one are treated as one: so small a difference does not matter to a schedule.
_DEADBAND = math.log(1.03)
# Factors are used while they remove at least this share of the table's error on steps that they were not yet learned
# from. The errors are moving averages with the second number as their weight.
_EXPLAINED, _HELD_OUT_WEIGHT = 0.1, 0.1
# A table that is off by more than this in most bins ought to be measured again.
_STALE = math.log(1.2)


class BinKey(NamedTuple):
    """Loads `[2 ** (load_bin - 1), 2 ** load_bin)` of a module, mean segments likewise (0 where there are none)."""

    module: str
    direction: str
    load_bin: int
    segment_bin: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedBin:
    """`log_ratio` is the log of the moving average of measured over table, `recent` the last steps' ratios."""

    log_ratio: float
    num_cells: int
    num_steps: int
    recent: tuple[float, ...]

    @property
    def counts(self) -> bool:
        return self.num_cells >= _MIN_CELLS and self.num_steps >= _NUM_RECENT


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corrections:
    """`factors` of a module are [2 (forward, backward), NUM_LOAD_BINS, NUM_SEGMENT_BINS]; a module left out has ones.

    `version` is the number of measured steps behind them.
    """

    version: int = 0
    factors: Mapping[str, np.ndarray] = field(default_factory=dict)

    def at(self, module: str, loads: Loads) -> np.ndarray:
        """Factors of microbatches' forward and backward, [2, *shape of the loads]."""
        if module not in self.factors:
            return np.ones((2, *np.shape(loads.num_items)))
        return self.factors[module][:, *bins_of(loads)]

    def table(self, module: str) -> np.ndarray:
        """A module's factors, [2, NUM_LOAD_BINS, NUM_SEGMENT_BINS]; all ones where it has none."""
        return self.factors.get(module, np.ones((2, NUM_LOAD_BINS, NUM_SEGMENT_BINS)))

    def least(self, module: str, samples: Loads) -> np.ndarray:
        """The smallest factor of any microbatch that may hold a sample of this batch, [num_samples].

        Such a microbatch has the load of the sample to that of the batch, and a mean segment between its samples'.
        """
        if module not in self.factors:
            return np.ones(np.shape(samples.num_items))
        load_bin, segment_bin = bins_of(samples)
        last, _ = bins_of(Loads(*(np.sum(load) for load in samples)))
        smallest = self.factors[module][:, :, segment_bin.min() : segment_bin.max() + 1].min(axis=(0, 2))
        upward = np.minimum.accumulate(smallest[: last + 1][::-1])[::-1]
        return upward[load_bin]


NO_CORRECTIONS = Corrections()


class HeldOut(NamedTuple):
    """How far predictions were off in steps that the corrections had not been learned from.

    `by_table` and `corrected` are mean squared logarithms of measured over predicted seconds, over `num_steps` steps.
    A ratio that all times of a step have in common is left out, because it changes no schedule.
    """

    by_table: float = 0.0
    corrected: float = 0.0
    num_steps: int = 0

    def after(self, by_table: float, corrected: float) -> "HeldOut":
        weight = max(_HELD_OUT_WEIGHT, 1 / (self.num_steps + 1))
        return HeldOut(
            self.by_table + weight * (by_table - self.by_table),
            self.corrected + weight * (corrected - self.corrected),
            self.num_steps + 1,
        )

    @property
    def pays(self) -> bool:
        return self.corrected < (1 - _EXPLAINED) * self.by_table


class Learner:
    """Learns the ratio of every bin.

    `corrections` are the factors to use now: those learned, as long as they predict better than the table (`held_out`).
    """

    def __init__(
        self, bins: Mapping[BinKey, LearnedBin] | None = None, num_steps: int = 0, held_out: HeldOut | None = None
    ) -> None:
        self.bins: dict[BinKey, LearnedBin] = dict(bins or {})
        self.num_steps = num_steps
        self.held_out = held_out or HeldOut()

    def observe(self, cells: Iterable[tuple[str, Loads, np.ndarray, np.ndarray]]) -> None:
        """Learn one step: (module, loads, table's seconds, measured seconds) of groups of stage microbatches.

        Seconds are [2 (forward, backward), *shape of the loads], the table's without any correction. Cells in which
        either is zero or not finite are left out.
        """
        cells = list(cells)
        self._compare(cells)
        sums: dict[BinKey, np.ndarray] = {}
        for module, loads, table_s, measured_s in cells:
            load_bin, segment_bin = bins_of(loads)
            usable = np.isfinite(table_s) & np.isfinite(measured_s) & (table_s > 0) & (measured_s > 0)
            for way, direction in enumerate(PASSES):
                chosen = usable[way]
                places = np.stack([load_bin[chosen], segment_bin[chosen]], axis=1)
                for place in np.unique(places, axis=0):
                    alike = (places == place).all(axis=1)
                    key = BinKey(module, direction, int(place[0]), int(place[1]))
                    new = [measured_s[way][chosen][alike].sum(), table_s[way][chosen][alike].sum(), alike.sum()]
                    sums[key] = sums.get(key, 0.0) + np.array(new, dtype=float)
        for key, (measured, by_table, num_cells) in sums.items():
            self.bins[key] = _followed(self.bins.get(key), float(measured / by_table), int(num_cells))
        self.num_steps += 1

    def _compare(self, cells: Iterable[tuple[str, Loads, np.ndarray, np.ndarray]]) -> None:
        """Compare the corrections learned before this step with its measured times."""
        so_far = self.learned
        if not so_far.factors:
            return
        log_ratios, log_factors, weights = [], [], []
        for module, loads, table_s, measured_s in cells:
            usable = np.isfinite(table_s) & np.isfinite(measured_s) & (table_s > 0) & (measured_s > 0)
            log_ratios.append(np.log(measured_s[usable] / table_s[usable]))
            log_factors.append(np.log(so_far.at(module, loads)[usable]))
            weights.append(table_s[usable])
        log_ratio, log_factor, weight = (np.concatenate(each) for each in (log_ratios, log_factors, weights))
        if weight.size:
            both = (log_ratio, log_ratio - log_factor)
            self.held_out = self.held_out.after(*(_spread(ratios, weight / weight.sum()) for ratios in both))

    @property
    def corrections(self) -> Corrections:
        """The learned factors, or none while they do not predict better than the table."""
        learned = self.learned
        return learned if self.held_out.pays else NO_CORRECTIONS

    @property
    def learned(self) -> Corrections:
        """The factors of all bins, shrunk as far as noise explains them. A bin with too few measurements gets the mean
        factor of its module and pass."""
        groups: dict[tuple[str, int], dict[tuple[int, int], LearnedBin]] = {}
        for key, learned in sorted(self.bins.items()):
            if learned.counts:
                group = groups.setdefault((key.module, PASSES.index(key.direction)), {})
                group[key.load_bin, key.segment_bin] = learned
        factors: dict[str, np.ndarray] = {}
        for (module, way), (middle, log_ratios) in zip(groups, _believed(list(groups.values())), strict=True):
            table = factors.setdefault(module, np.ones((2, NUM_LOAD_BINS, NUM_SEGMENT_BINS)))
            table[way] = _factor(middle)
            for place, log_ratio in zip(groups[module, way], log_ratios.tolist(), strict=True):
                table[way][place] = _factor(log_ratio)
        return Corrections(
            version=self.num_steps,
            factors={module: table for module, table in factors.items() if (table != 1.0).any()},
        )

    def table(self) -> list[dict[str, Any]]:
        """One row of the `corrections` table (`CORRECTIONS_SCHEMA`) for each measured bin."""
        corrections = self.corrections
        return [
            {
                "module": key.module,
                "pass": key.direction,
                "least_load": 2 ** (key.load_bin - 1),
                "least_segment": 2 ** (key.segment_bin - 1) if key.segment_bin else None,
                "num_observations": learned.num_cells,
                "num_steps": learned.num_steps,
                "ratio": math.exp(learned.log_ratio),
                "factor": float(
                    corrections.table(key.module)[PASSES.index(key.direction), key.load_bin, key.segment_bin]
                ),
            }
            for key, learned in sorted(self.bins.items())
        ]

    def to_dict(self) -> dict[str, Any]:
        """The learner's state as plain values, for `from_dict`."""
        rows = [
            {
                **key._asdict(),
                "log_ratio": learned.log_ratio,
                "num_cells": learned.num_cells,
                "num_steps": learned.num_steps,
                "recent": list(learned.recent),
            }
            for key, learned in sorted(self.bins.items())
        ]
        return {"num_steps": self.num_steps, "held_out": list(self.held_out), "bins": rows}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Learner":
        bins = {}
        for row in values["bins"]:
            key = BinKey(*(row[name] for name in BinKey._fields))
            learned = {name: row[name] for name in ("log_ratio", "num_cells", "num_steps")}
            bins[key] = LearnedBin(**learned, recent=tuple(row["recent"]))
        return cls(bins, values["num_steps"], HeldOut(*values.get("held_out", ())))


def bins_of(loads: Loads) -> tuple[np.ndarray, np.ndarray]:
    """The load bin and the segment bin of each microbatch, ints of the loads' shape.

    The main load of a microbatch with tokens is their number; that of any other is its number of items.
    """
    main = np.where(np.asarray(loads.num_tokens) > 0, loads.num_tokens, loads.num_items).astype(float)
    segment = np.asarray(loads.sum_sq_tokens) / np.maximum(main, 1.0)
    return (
        np.minimum(np.frexp(main)[1], NUM_LOAD_BINS - 1),
        np.minimum(np.frexp(segment)[1], NUM_SEGMENT_BINS - 1),
    )


@kernel
def bin_of(loads):
    """`bins_of` of one microbatch's loads [4], for kernels."""
    main = loads[1] if loads[1] > 0.0 else loads[0]
    segment = loads[2] / max(main, 1.0)
    return min(math.frexp(main)[1], NUM_LOAD_BINS - 1), min(math.frexp(segment)[1], NUM_SEGMENT_BINS - 1)


def stale_share(bins: Mapping[BinKey, LearnedBin]) -> float:
    """Of bins with enough measurements, the share that is off by a factor above 1.2; 0 without such bins."""
    known = [learned for learned in bins.values() if learned.counts]
    return float(np.mean([abs(learned.log_ratio) > _STALE for learned in known])) if known else 0.0


def is_stale(bins: Mapping[BinKey, LearnedBin]) -> bool:
    """Whether most of these bins are off: the table was measured on another device, or the device has changed."""
    return stale_share(bins) > 0.5


def _followed(known: LearnedBin | None, ratio: float, num_cells: int) -> LearnedBin:
    recent = (*(known.recent if known else ()), ratio)[-_NUM_RECENT:]
    middle = float(np.mean(sorted(recent)[1:-1] if len(recent) > 2 else recent))
    # The moving average begins with the trimmed mean of the first `_NUM_RECENT` steps.
    if known is not None and known.num_steps >= _NUM_RECENT:
        before = math.exp(known.log_ratio)
        middle = before + _WEIGHT * (middle - before)
    return LearnedBin(
        log_ratio=math.log(middle),
        num_cells=num_cells + (known.num_cells if known else 0),
        num_steps=1 + (known.num_steps if known else 0),
        recent=recent,
    )


def _believed(groups: list[dict[Any, LearnedBin]]) -> list[tuple[float, np.ndarray]]:
    """Each group's mean log ratio over its microbatches, and the log ratio of each of its bins.

    Bins are shrunk towards their group's mean, and the means towards each other, as far as noise explains the
    differences: only differences change a schedule. Of five recent steps in order, the fourth less the second estimates
    a standard deviation (0.99 of it for a normal distribution), whatever the tails.
    """
    middles, errors, distances = [], [], []
    for bins in (list(group.values()) for group in groups):
        weights = np.array([learned.num_cells for learned in bins]) / sum(learned.num_cells for learned in bins)
        log_ratios = np.array([learned.log_ratio for learned in bins])
        recent = np.log(np.sort([learned.recent for learned in bins], axis=1))
        error = float(np.mean((recent[:, -2] - recent[:, 1]) ** 2)) / _NUM_RECENT
        middle = float(weights @ log_ratios)
        middles.append(middle)
        errors.append(error * float(weights @ weights))
        distances.append(_drawn(log_ratios - middle, error))
    if not groups:
        return []
    mean = float(np.mean(middles))
    drawn = mean + _drawn(np.array(middles) - mean, float(np.mean(errors)))
    return [(middle, middle + distance) for middle, distance in zip(drawn.tolist(), distances, strict=True)]


def _drawn(distances: np.ndarray, error: float) -> np.ndarray:
    """Distances from a mean, shrunk by the share of their variance that is noise: `error`, a squared standard error.

    This is empirical Bayes with the variance of DerSimonian and Laird (1986), unweighted. The error is that of a mean
    over recent steps, which the moving average undercuts by a third: distances are shrunk rather too much.
    """
    between = float(np.mean(distances**2)) - error
    return distances * (between / (between + error) if between > 0 else 0.0)


def _spread(log_ratios: np.ndarray, weights: np.ndarray) -> float:
    """The weighted mean square about the weighted mean."""
    return float(weights @ (log_ratios - weights @ log_ratios) ** 2)


def _factor(log_ratio: float) -> float:
    return math.exp(log_ratio) if abs(log_ratio) > _DEADBAND else 1.0
