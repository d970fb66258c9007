"""Loads of a microbatch, and linear functions of them: what a module's work and its cost are written in."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["FEATURES", "Coefficients", "Loads"]

# The loads that a module's cost depends on; encoders see items, the LLM sees packed text.
FEATURES = ("num_items", "num_tokens", "sum_sq_tokens", "num_targets")


class Loads(NamedTuple):
    """Loads of microbatches; every array has the same shape, and so has what is computed from them."""

    num_items: np.ndarray
    num_tokens: np.ndarray
    sum_sq_tokens: np.ndarray
    num_targets: np.ndarray


@dataclass(frozen=True, slots=True)
class Coefficients:
    """`const + sum(per_load * load) + sum(slope * max(0, load[along] - at))`; `per_load` follows `FEATURES`.

    `hinges` are pairs of (at, slope), by which a small microbatch may cost less a unit than a large one.
    """

    const: float
    per_load: tuple[float, ...]
    hinges: tuple[tuple[float, float], ...] = ()
    along: int = 0

    def __call__(self, loads: Loads) -> np.ndarray:
        total = np.full(np.shape(loads.num_items), self.const)
        for coefficient, load in zip(self.per_load, loads, strict=True):
            if coefficient:
                total += coefficient * load
        for at, slope in self.hinges:
            total += slope * np.maximum(np.asarray(loads[self.along]) - at, 0.0)
        return total

    @property
    def forms(self) -> np.ndarray:
        """Constants and units of each load of the lines whose largest this is, [1 + num_hinges, 1 + num_features]."""
        lines = [np.array([self.const, *self.per_load])]
        for at, slope in self.hinges:
            line = lines[-1].copy()
            line[0] -= slope * at
            line[1 + self.along] += slope
            lines.append(line)
        return np.array(lines)

    def without_const(self, *, least: bool) -> "Coefficients":
        """What a unit of load adds: at `least`, or as the last hinge sees it (the mean slope up to twice there)."""
        per_load = list(self.per_load)
        if self.hinges and not least:
            end = 2 * self.hinges[-1][0]
            per_load[self.along] += sum(slope * (end - at) for at, slope in self.hinges) / end
        return Coefficients(0.0, tuple(per_load))
