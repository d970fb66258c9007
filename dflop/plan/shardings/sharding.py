"""The interface of a sharding, which fixes what the replicas of a module's stages divide among them."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dflop.base import UserError
from dflop.plan.layout_key import LayoutKey

if TYPE_CHECKING:
    from dflop.plan.grid import Grid

__all__ = ["Sharding"]


class Sharding(ABC):
    """One sharding. AdamW's moments are always divided: among all replicas, or as the parameters are."""

    name: str
    # Whether parameters and gradients are divided as well. Each layer's parameters are then gathered before its forward
    # and again before its backward, and its gradients are summed into the shards after every backward. So replicas that
    # share a copy of the parameters communicate in every layer of every microbatch.
    gathers = False
    # Whether a grid must give `shards`.
    needs_shards = False

    @abstractmethod
    def num_shards(self, grid: "Grid") -> int:
        """The number of neighbouring replicas that divide a copy of the parameters among them."""

    @abstractmethod
    def shards_worth_a_look(self, dp: int, layout: LayoutKey, devices_per_node: int) -> int | None:
        """The number of shards that the search tries for `dp` replicas of this layout, e.g. the 8 replicas of a
        node; None if the sharding makes no sense with them."""

    def check(self, grid: "Grid") -> None:
        """Check that the sharding allows a grid.

        Raises:
            UserError: naming the size that it does not allow, and one that it does.
        """
        if self.gathers and grid.pp > 1:
            raise UserError(
                f"{grid.module}: sharding={self.name} with pp={grid.pp} would gather each layer again for every "
                "microbatch in flight; use pp: 1, or sharding: optimizer"
            )
        self._check_shards(grid)

    def _check_shards(self, grid: "Grid") -> None:
        if grid.shards is not None:
            raise UserError(
                f"{grid.module}: shards={grid.shards} with sharding={self.name}, which fixes them; leave shards out, "
                "or use sharding: hybrid"
            )
