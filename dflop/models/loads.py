"""Loads of a microbatch, and linear functions of them: what a module's work and its cost are written in."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["FEATURES", "Coefficients", "Hinge", "Loads", "loads_behind", "main_load", "ramp"]

# The loads that a module's cost depends on; encoders see items, the LLM sees packed text. `sum_sq_tokens` are the
# squared lengths of what attends to itself: of the LLM's segments in tokens, of an encoder's runs in items (0 where
# they are all of one length).
FEATURES = ("num_items", "num_tokens", "sum_sq_tokens", "num_targets")


class Loads(NamedTuple):
    """Loads of microbatches; every array has the same shape, and so has what is computed from them."""

    num_items: np.ndarray
    num_tokens: np.ndarray
    sum_sq_tokens: np.ndarray
    num_targets: np.ndarray


_OF_TEXT = {
    "stage": ("num_tokens",),
    "layer": ("num_tokens", "sum_sq_tokens"),
    "first": ("num_tokens",),
    "last": ("num_tokens", "num_targets"),
}
_OF_MEDIA = dict.fromkeys(_OF_TEXT, ("num_items",)) | {"layer": ("num_items", "sum_sq_tokens")}


def loads_behind(module: str, part: str = "layer") -> tuple[str, ...]:
    """The loads that a part of a module costs by, in the order of `FEATURES`."""
    return (_OF_TEXT if module == "llm" else _OF_MEDIA)[part]


def main_load(module: str, part: str = "layer") -> str:
    """The load that a part's throughput depends on."""
    behind = loads_behind(module, part)
    return "num_targets" if "num_targets" in behind else behind[0]


class Hinge(NamedTuple):
    """From `at` on, a unit of the load adds `slope` more, or less; `load` is its place in `FEATURES`."""

    load: int
    at: float
    slope: float


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A function of a microbatch's loads: `const + sum(per_load * load) + sum(slope * max(0, load - at))`.

    `per_load` follows `FEATURES`. With hinges a unit costs less in a small microbatch than in a large one, or, of
    memory that is needed for a part of the microbatch at a time, more. Functions can be added, and multiplied by a
    number.
    """

    const: float
    per_load: tuple[float, ...]
    hinges: tuple[Hinge, ...] = ()

    def __call__(self, loads: Loads) -> np.ndarray:
        # Searching for plans asks this some hundred thousand times, mostly of small arrays: each array made counts.
        total = None
        for coefficient, load in zip(self.per_load, loads, strict=True):
            if coefficient:
                term = coefficient * load
                term += self.const if total is None else total
                total = term
        if total is None:
            total = np.full(np.shape(loads.num_items), self.const)
        for load, at, slope in self.hinges:
            beyond = loads[load] - at
            total += slope * np.maximum(beyond, 0.0)
        return total

    def __add__(self, other: "Coefficients") -> "Coefficients":
        per_load = tuple(own + its for own, its in zip(self.per_load, other.per_load, strict=True))
        return Coefficients(self.const + other.const, per_load, self.hinges + other.hinges)

    def __rmul__(self, factor: float) -> "Coefficients":
        hinges = tuple(Hinge(load, at, factor * slope) for load, at, slope in self.hinges)
        return Coefficients(factor * self.const, tuple(factor * value for value in self.per_load), hinges)

    def raised_by(self, const: float) -> "Coefficients":
        """The same function, and a number more."""
        return Coefficients(self.const + const, self.per_load, self.hinges)

    def without_const(self, *, least: bool) -> "Coefficients":
        """What a unit of load adds: at `least`, or as the last hinge sees it (the mean slope up to twice there). All
        hinges have to be along one load, in ascending order."""
        per_load = list(self.per_load)
        if self.hinges and not least:
            along, last, _ = self.hinges[-1]
            end = 2 * last
            per_load[along] += sum(slope * (end - at) for _, at, slope in self.hinges) / end
        return Coefficients(0.0, tuple(per_load))


def ramp(feature: str, start: float, end: float, slope: float) -> Coefficients:
    """`slope` for each unit of the load between `start` and `end`."""
    load = FEATURES.index(feature)
    per_load = tuple(slope if start == 0 and place == load else 0.0 for place in range(len(FEATURES)))
    hinges = ((start, slope), (end, -slope))
    return Coefficients(0.0, per_load, tuple(Hinge(load, at, own) for at, own in hinges if 0 < at < math.inf))
