"""The loads of a microbatch, and functions of them, in which a module's work and cost are expressed."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["FEATURES", "Coefficients", "Hinge", "Loads", "coefficients", "loads_behind", "main_load", "ramp"]

# The loads that a module's cost depends on: items for encoders, packed text for the LLM. `sum_sq_tokens` is the sum of
# the squared lengths of what attends to itself: the LLM's segments, in tokens, or an encoder's runs, in items (0 if all
# of these have the same length). The LLM has no items: there, `num_items` are tokens of other replicas' shares of
# samples, whose keys and values come to this one.
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
    "attention": ("num_tokens", "sum_sq_tokens"),
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
    """A change of slope: above `at`, each unit of the load adds `slope` more (less, if it is negative). `load` is the
    load's index in `FEATURES`."""

    load: int
    at: float
    slope: float


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A function of a microbatch's loads: `const + sum(per_load * load) + sum(slope * max(0, load - at))`.

    `per_load` is in the order of `FEATURES`. Hinges let a unit of load cost more or less in a large microbatch than in
    a small one. Coefficients can be added, and multiplied by a number.
    """

    const: float
    per_load: tuple[float, ...]
    hinges: tuple[Hinge, ...] = ()

    def __call__(self, loads: Loads) -> np.ndarray:
        # Called very often, and mostly on small arrays: each temporary array costs.
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

    def merged(self) -> "Coefficients":
        """The same function with one hinge at each place, in ascending order."""
        hinges = tuple(Hinge(*place, slope) for place, slope in sorted(self._slopes().items()))
        return Coefficients(self.const, self.per_load, hinges)

    def without(self, other: "Coefficients") -> "Coefficients":
        """This function without the other, of which no constant and no slope counts that is more than its own."""
        slopes, its_slopes = self._slopes(), other._slopes()
        hinges = tuple(
            Hinge(*place, left)
            for place, own in sorted(slopes.items())
            if (left := _less(own, its_slopes.get(place, 0)))
        )
        per_load = tuple(map(_less, self.per_load, other.per_load))
        return Coefficients(_less(self.const, other.const), per_load, hinges)

    def _slopes(self) -> dict[tuple[int, float], float]:
        slopes: dict[tuple[int, float], float] = {}
        for load, at, slope in self.hinges:
            slopes[load, at] = slopes.get((load, at), 0.0) + slope
        return slopes

    def raised_by(self, const: float) -> "Coefficients":
        """The same function plus `const`."""
        return Coefficients(self.const + const, self.per_load, self.hinges)

    def without_const(self, *, least: bool) -> "Coefficients":
        """The function without its constant and hinges: with the slope of an empty microbatch if `least`, else with the
        mean slope up to twice the last hinge's load. All hinges must be of one load, in ascending order."""
        per_load = list(self.per_load)
        if self.hinges and not least:
            along, last, _ = self.hinges[-1]
            end = 2 * last
            per_load[along] += sum(slope * (end - at) for _, at, slope in self.hinges) / end
        return Coefficients(0.0, tuple(per_load))


def _less(own: float, its: float) -> float:
    return own - min(max(own, 0.0), its)


def coefficients(const: float = 0.0, **per_load: float) -> Coefficients:
    """A linear function of the named loads (`FEATURES`)."""
    return Coefficients(float(const), tuple(float(per_load.get(feature, 0.0)) for feature in FEATURES))


def ramp(feature: str, start: float, end: float, slope: float) -> Coefficients:
    """`slope` for each unit of the load `feature` between `start` and `end`, and nothing outside."""
    load = FEATURES.index(feature)
    per_load = tuple(slope if start == 0 and place == load else 0.0 for place in range(len(FEATURES)))
    hinges = ((start, slope), (end, -slope))
    return Coefficients(0.0, per_load, tuple(Hinge(load, at, own) for at, own in hinges if 0 < at < math.inf))
