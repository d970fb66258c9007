"""What a check of the kit is: a question, limits for its figures, and the function that measures them."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["Check", "Limit", "Setting", "Skipped", "at_least", "at_most", "between"]

Figures = dict[str, float | str]


class Skipped(Exception):
    """Raised by a check that cannot be done here; its text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Where and how to check: `device` is cuda or cpu, `is_tiny` stands for sizes that try the kit and measure nothing,
    `is_fast` for fewer of them. Checks of one run share `folder`."""

    device: str
    is_tiny: bool
    is_fast: bool
    folder: Path


@dataclass(frozen=True, slots=True)
class Limit:
    """A range of good values. One that is `of_card` counts on GPUs only: it is about time or memory."""

    least: float = -math.inf
    most: float = math.inf
    of_card: bool = False

    def __str__(self) -> str:
        ends = [f">= {self.least:g}"] if math.isfinite(self.least) else []
        return " and ".join([*ends, *([f"<= {self.most:g}"] if math.isfinite(self.most) else [])])

    def holds(self, value: float | str) -> bool:
        return not isinstance(value, str) and self.least <= value <= self.most


def at_most(value: float, *, of_card: bool = False) -> Limit:
    return Limit(most=value, of_card=of_card)


def at_least(value: float, *, of_card: bool = False) -> Limit:
    return Limit(least=value, of_card=of_card)


def between(least: float, most: float, *, of_card: bool = False) -> Limit:
    return Limit(least, most, of_card)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Check:
    """A check.

    - `shows`: what it shows, in a sentence.
    - `run`: its function as `module:function`, of a module of this package. It takes a `Setting`, and returns figures
      by name, or yields them as they are found, so that those of a check that takes too long are not lost. It is
      imported only where it runs, since it may need packages that are not there.
    - `seconds`: what it is expected to take on an H100, and with `--fast` `fast_s`, which leaves out the check if it is
      None. It is ended after three times as many seconds and a minute.
    - `is_timed`: whether it counts seconds or memory of the card, so that nothing else may run on it meanwhile.
    - `needs`: packages that commands which it starts import, so that without them it is skipped.
    - `limits`: by the beginning of a figure's name. A figure with no limit is for people to read.
    """

    name: str
    shows: str
    run: str
    seconds: float
    limits: Mapping[str, Limit] = field(default_factory=dict)
    fast_s: float | None = None
    is_timed: bool = True
    needs: tuple[str, ...] = ()

    @property
    def longest_s(self) -> float:
        return 3 * self.seconds + 60

    def seconds_of(self, *, is_fast: bool) -> float:
        return (self.fast_s if is_fast else None) or self.seconds

    def measure(self, setting: Setting) -> Iterator[Figures]:
        """The figures, measured in this process: those that there are so far, each time that there are more."""
        for package in self.needs:
            import_module(package)
        module, _, name = self.run.partition(":")
        function: Callable[[Setting], Figures | Iterator[Figures]] = getattr(
            import_module(f"{__package__}.{module}"), name
        )
        measured, figures = function(setting), {}
        for more in (measured,) if isinstance(measured, dict) else measured:
            figures |= more
            yield figures

    def limit_of(self, figure: str, device: str) -> Limit | None:
        """The limit that counts for a figure on this device: that of the longest beginning of its name."""
        named = max((start for start in self.limits if figure.startswith(start)), key=len, default=None)
        limit = None if named is None else self.limits[named]
        return None if limit is None or (limit.of_card and device != "cuda") else limit

    def judged(self, figures: Mapping[str, Any], device: str) -> dict[str, Any]:
        """`status` (pass or fail), `figures`, and `limits` by figure, with those that are missed in `missed`."""
        limits = {name: limit for name in figures if (limit := self.limit_of(name, device))}
        missed = [name for name, limit in limits.items() if not limit.holds(figures[name])]
        return {
            "status": "fail" if missed else "pass",
            "figures": dict(figures),
            "limits": {name: str(limit) for name, limit in limits.items()},
            "missed": missed,
        }
