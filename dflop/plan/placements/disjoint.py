"""Disjoint: every module has ranks of its own, encoders before the LLM."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflop.plan.grid import Grid, tile_world
from dflop.plan.layout_key import LayoutKey, ModuleLayout
from dflop.plan.placements.placement import Placement

if TYPE_CHECKING:
    from dflop.plan.plan import Plan

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
        self, num_ranks: int, llm: ModuleLayout, layouts: Sequence[LayoutKey], pp_sizes: Sequence[int]
    ) -> list[ModuleLayout]:
        return [
            ModuleLayout(layout, pp, num_ranks // (layout.num_ranks * pp))
            for layout in layouts
            for pp in pp_sizes
            if num_ranks % (layout.num_ranks * pp) == 0
        ]


PLACEMENT = Disjoint()
