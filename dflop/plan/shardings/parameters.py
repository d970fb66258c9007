"""Parameters, gradients and moments are divided among all replicas (ZeRO-3, FSDP; Zhao et al. 2023)."""

from typing import TYPE_CHECKING

from dflop.plan.layout_key import LayoutKey
from dflop.plan.shardings.sharding import Sharding

if TYPE_CHECKING:
    from dflop.plan.grid import Grid

__all__ = ["SHARDING"]


class Parameters(Sharding):
    name = "parameters"
    gathers = True

    def num_shards(self, grid: "Grid") -> int:
        return grid.dp

    def shards_worth_a_look(self, dp: int, layout: LayoutKey, devices_per_node: int) -> int | None:
        return dp if dp > 1 else None


SHARDING = Parameters()
