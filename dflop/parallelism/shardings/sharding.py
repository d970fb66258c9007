"""What a sharding says of itself.

A sharding fixes what the replicas of a module's stages divide among them.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dflop.runtime import UserError

if TYPE_CHECKING:
    from dflop.parallelism.grid import Grid

__all__ = ["Sharding"]


class Sharding(ABC):
    """One sharding. AdamW's moments are always divided, among all replicas or as the parameters are."""

    name: str
    # Whether parameters and gradients are divided as well. Then each layer's parameters are gathered before its forward
    # and again before its backward, and its gradients are summed into the shards behind every backward: replicas that
    # share a copy of the parameters meet in every layer of every microbatch.
    gathers = False
    # Whether a grid has to say among how many replicas.
    needs_shards = False

    @abstractmethod
    def num_shards(self, grid: "Grid") -> int:
        """Among how many replicas, which are neighbours, a copy of the parameters is divided."""

    @abstractmethod
    def shards_worth_a_look(self, dp: int, tp: int, devices_per_node: int) -> int | None:
        """The number of shards that the search tries with such a layout; None where the sharding makes no sense."""

    def check(self, grid: "Grid") -> None:
        """Check what the sharding demands of a grid.

        Raises:
            UserError: naming the size that does not fit, and what would do.
        """
        if self.gathers and grid.pp > 1:
            raise UserError(
                f"{grid.module}: sharding={self.name} with pp={grid.pp} would gather each layer for every microbatch "
                "in flight; use pp: 1, or sharding: optimizer"
            )
        self._check_shards(grid)

    def _check_shards(self, grid: "Grid") -> None:
        if grid.shards is not None:
            raise UserError(
                f"{grid.module}: shards={grid.shards} with sharding={self.name}, which fixes them; leave shards out, "
                "or use sharding: hybrid"
            )
