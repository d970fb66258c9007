"""Layout keys: how one layer of a module is divided over ranks, as one value.

Cost tables, stage kinds, grids and the search hand this value on and never look inside. Whoever divides a layer in a
further way (context, experts) adds a size here, its column in the cost tables and its key in a grid.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

__all__ = ["LayoutKey", "ModuleLayout"]


class LayoutKey(NamedTuple):
    """The sizes that a layer is divided by, e.g. `tp=2`: two ranks compute it together."""

    tp: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks that compute a layer together."""
        return self.tp

    @classmethod
    def of_row(cls, row: Mapping[str, Any], prefix: str = "") -> Self:
        """The key in a table's row: from the columns `tp`, or `llm_tp` with the prefix `llm_`."""
        return cls(*(row[f"{prefix}{size}"] for size in cls._fields))

    @classmethod
    def columns(cls, prefix: str = "") -> list[str]:
        """The columns that hold the key in a table."""
        return [f"{prefix}{size}" for size in cls._fields]

    def __str__(self) -> str:
        return " ".join(f"{size}={value}" for size, value in self._asdict().items())


class ModuleLayout(NamedTuple):
    """How a module is divided: a layer as `layout` says, its layers over `pp` stages, samples over `dp` replicas."""

    layout: LayoutKey
    pp: int
    dp: int

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks * self.pp * self.dp

    @property
    def sizes(self) -> tuple[int, ...]:
        """The values of `columns`."""
        return (*self.layout, self.pp, self.dp)

    @classmethod
    def of_row(cls, row: Mapping[str, Any], module: str) -> Self:
        """A module's layout in a row of the search space: from the columns `llm_tp`, `llm_pp` and `llm_dp`."""
        return cls(LayoutKey.of_row(row, f"{module}_"), row[f"{module}_pp"], row[f"{module}_dp"])

    @staticmethod
    def columns(module: str) -> list[str]:
        """The columns that hold a module's layout in the search space."""
        return [*LayoutKey.columns(f"{module}_"), f"{module}_pp", f"{module}_dp"]
