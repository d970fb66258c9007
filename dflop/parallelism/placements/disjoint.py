"""Disjoint: every module has ranks of its own, encoders before the LLM."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflop.parallelism.grid import Grid, tile_world
from dflop.parallelism.placements.placement import Placement

if TYPE_CHECKING:
    from dflop.parallelism.plan import Plan

__all__ = ["PLACEMENT"]


class Disjoint(Placement):
    name = "disjoint"

    def check(self, plan: "Plan") -> None:
        tile_world(plan.grids, plan.world_size)

    def world_size(self, grids: Sequence[Grid]) -> int:
        return sum(grid.num_ranks for grid in grids)

    def encoder_stages(self, pp: int) -> range:
        return range(0)

    def encoder_layouts(
        self, num_ranks: int, llm: tuple[int, int, int], tp_sizes: Sequence[int], pp_sizes: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        return [(tp, pp, num_ranks // (tp * pp)) for tp in tp_sizes for pp in pp_sizes if num_ranks % (tp * pp) == 0]


PLACEMENT = Disjoint()
