"""Parameters, gradients and moments are divided inside each node, and every node has a copy.

This is HSDP (Zhao et al. 2023, section 3.2.2). Layers are gathered over the links inside nodes; gradients are summed
between nodes once a step.
"""

import math
from typing import TYPE_CHECKING

from dflop.base import UserError
from dflop.plan.layout_key import LayoutKey
from dflop.plan.shardings.sharding import Sharding

if TYPE_CHECKING:
    from dflop.plan.grid import Grid

__all__ = ["SHARDING"]


class Hybrid(Sharding):
    name = "hybrid"
    gathers = True
    needs_shards = True

    def num_shards(self, grid: "Grid") -> int:
        assert grid.shards is not None, "checked when the grid was made"
        return grid.shards

    def shards_worth_a_look(self, dp: int, layout: LayoutKey, devices_per_node: int) -> int | None:
        in_node = math.gcd(dp, max(1, devices_per_node // layout.num_ranks))
        return in_node if 1 < in_node < dp else None

    def _check_shards(self, grid: "Grid") -> None:
        if grid.shards is None or not 1 < grid.shards < grid.dp or grid.dp % grid.shards:
            raise UserError(
                f"{grid.module}: sharding=hybrid with shards={grid.shards}; it must be the number of replicas that "
                f"share a copy of the parameters, more than 1 and a part of dp={grid.dp} (those of one node)"
            )


SHARDING = Hybrid()
