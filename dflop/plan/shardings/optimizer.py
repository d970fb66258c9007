"""Only optimizer state is divided among the replicas (ZeRO-1; Rajbhandari et al. 2020, section 5.1)."""

from typing import TYPE_CHECKING

from dflop.plan.layout_key import LayoutKey
from dflop.plan.shardings.sharding import Sharding

if TYPE_CHECKING:
    from dflop.plan.grid import Grid

__all__ = ["SHARDING"]


class OptimizerState(Sharding):
    name = "optimizer"

    def num_shards(self, grid: "Grid") -> int:
        return 1

    def shards_worth_a_look(self, dp: int, layout: LayoutKey, devices_per_node: int) -> int | None:
        return 1


SHARDING = OptimizerState()
