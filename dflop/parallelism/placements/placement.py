"""What a placement says of itself.

A placement fixes which ranks the encoders own beside the LLM's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflop.parallelism.grid import Grid, tile_world
from dflop.runtime import UserError

if TYPE_CHECKING:
    from dflop.parallelism.plan import Plan

__all__ = ["Placement", "SharedRanks"]


class Placement(ABC):
    """One placement. Where `shares_ranks`, encoders have ranks of the LLM, and else ranks of their own."""

    name: str
    shares_ranks = False
    # Whether encoder replicas are chosen apart from the LLM's, so that features cross from any of them to any of the
    # LLM's. Where not, each replica of the LLM's first stage encodes its own samples, and what both do adds up.
    has_bridges = True
    # Whether all of the LLM's ranks carry encoders.
    uses_all_ranks = False
    # Whether a rank computes all its encoder forwards of a step before the LLM's, and all backwards behind them.
    encodes_all_first = False
    # Whether each batch has an order of its own, in which encoders compute while a rank would wait: `with_encoders_at`.
    fills_bubbles = False

    @abstractmethod
    def check(self, plan: "Plan") -> None:
        """Check the plan's grids.

        Raises:
            UserError: naming the module whose ranks do not fit, and those that would.
        """

    @abstractmethod
    def world_size(self, grids: Sequence[Grid]) -> int:
        """The number of ranks of all modules together."""

    @abstractmethod
    def encoder_stages(self, pp: int) -> range:
        """Which of the LLM's `pp` pipeline ranks carry the encoders as well."""

    @abstractmethod
    def encoder_layouts(
        self, num_ranks: int, llm: tuple[int, int, int], tp_sizes: Sequence[int], pp_sizes: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """The (tp, pp, dp) that an encoder may have beside an LLM of such (tp, pp, dp), out of these sizes.

        `num_ranks` is what it has where it has ranks of its own.
        """

    def bridged_replicas(self, encoder_replica: int, llm_dp: int) -> range:
        """Which of the LLM's replicas take features from this one of an encoder."""
        return range(llm_dp) if self.has_bridges else range(encoder_replica, encoder_replica + 1)


class SharedRanks(Placement):
    """Encoders of one stage on ranks of the LLM, which is what `where` says in words."""

    shares_ranks = True
    where: str

    def check(self, plan: "Plan") -> None:
        llm = plan.grid("llm")
        tile_world((llm,), llm.num_ranks)
        num_ranks = len(self.encoder_stages(llm.pp)) * llm.dp * llm.tp
        for encoder in plan.grids[:-1]:
            if (encoder.num_ranks, encoder.rank_offset, encoder.pp) != (num_ranks, 0, 1):
                raise UserError(
                    f"{encoder.module}: {encoder.num_ranks} ranks from rank {encoder.rank_offset} on with "
                    f"pp={encoder.pp}, but {self.name} encoders own {self.where}; "
                    f"use num_ranks: {num_ranks}, rank_offset: 0, pp: 1"
                )
            if not self.has_bridges and encoder.tp != llm.tp:
                raise UserError(
                    f"{encoder.module}: tp={encoder.tp}, but a {self.name} encoder has the LLM's grid; use tp: {llm.tp}"
                )

    def world_size(self, grids: Sequence[Grid]) -> int:
        return grids[-1].num_ranks

    @abstractmethod
    def with_encoders(
        self, pipeline: list[np.ndarray], first: int, forwards: np.ndarray, backwards: np.ndarray
    ) -> list[np.ndarray]:
        """The orders of the LLM's pipeline ranks with the encoders' computations in them.

        Each row of an order is a pass, a stage and a microbatch; the encoders' `forwards` and `backwards` come by
        microbatch; `first` is the LLM's first stage.
        """

    def with_encoders_at(
        self, slots: np.ndarray, pipeline: list[np.ndarray], forwards: np.ndarray, backwards: np.ndarray
    ) -> list[np.ndarray]:
        """As `with_encoders`, with the encoders' computations of each microbatch where `slots` [2 (forward, backward),
        num_pipeline_ranks, num_microbatches] has them: behind so many of the rank's LLM computations."""
        raise NotImplementedError(f"{self.name} plans have one order for all batches")
