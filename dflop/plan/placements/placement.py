"""The interface of a placement, which fixes on which ranks the encoders are, relative to the LLM's."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflop.base import UserError
from dflop.plan.grid import Grid, tile_world
from dflop.plan.layout_key import LayoutKey, ModuleLayout

if TYPE_CHECKING:
    from dflop.plan.plan import Plan

__all__ = ["Placement", "SharedRanks"]


class Placement(ABC):
    """One placement."""

    name: str
    # Whether encoders are on ranks of the LLM, and not on ranks of their own.
    shares_ranks = False
    # Whether any encoder replica may encode a sample, so that features cross to any replica of the LLM. If not, each
    # replica of the LLM's first stage encodes its own samples, one module after the other.
    has_bridges = True
    # Whether all of the LLM's ranks have a part of each encoder.
    uses_all_ranks = False
    # Whether a rank computes all its encoder forwards of a step before the LLM's, and all encoder backwards after them.
    encodes_all_first = False
    # Whether each batch has its own order, in which encoders compute while a rank would wait (`with_encoders_at`).
    fills_bubbles = False

    @abstractmethod
    def check(self, plan: "Plan") -> None:
        """Check the plan's grids.

        Raises:
            UserError: naming the module whose ranks do not fit, and those that would.
        """

    @abstractmethod
    def world_size(self, grids: Sequence[Grid]) -> int:
        """The number of ranks that all modules together occupy."""

    @abstractmethod
    def encoder_stages(self, pp: int) -> range:
        """Which of the LLM's `pp` pipeline ranks have the encoders as well."""

    @abstractmethod
    def encoder_layouts(
        self, num_ranks: int, llm: ModuleLayout, layouts: Sequence[LayoutKey], pp_sizes: Sequence[int]
    ) -> list[ModuleLayout]:
        """The layouts that an encoder may have beside an LLM with the layout `llm`, from these sizes.

        `num_ranks` is the encoder's number of ranks, if it has ranks of its own.
        """

    def bridged_replicas(self, encoder_replica: int, llm_dp: int) -> range:
        """Which of the LLM's replicas may take features from this replica of an encoder."""
        return range(llm_dp) if self.has_bridges else range(encoder_replica, encoder_replica + 1)


class SharedRanks(Placement):
    """Encoders of one pipeline stage each, on ranks of the LLM. `where` names these ranks in messages."""

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
        """The orders of the LLM's pipeline ranks, with the encoders' computations inserted.

        An order is [num_computations, 3]: pass, stage and microbatch. `pipeline` has the order of each pipeline rank,
        `forwards` and `backwards` are the encoders' computations in the order of microbatches, and `first` is the
        number of the LLM's first stage.
        """

    def with_encoders_at(
        self, slots: np.ndarray, pipeline: list[np.ndarray], forwards: np.ndarray, backwards: np.ndarray
    ) -> list[np.ndarray]:
        """As `with_encoders`, but with the encoders' computations in given places. `slots` [2 (forward, backward),
        num_pipeline_ranks, num_microbatches] says after how many of the rank's LLM computations each of them comes.

        Raises:
            NotImplementedError: for a placement that does not fill bubbles.
        """
        raise NotImplementedError(f"{self.name} plans have one order for all batches")
