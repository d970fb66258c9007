"""Colocated: every rank of the LLM holds a shard of each encoder as well, each module with its own tp and dp.

A rank does all encoder forwards of a step, then its part of the LLM's pipeline, then all encoder backwards.
"""

from collections.abc import Sequence

import numpy as np

from dflop.plan.layout_key import LayoutKey, ModuleLayout
from dflop.plan.placements.placement import SharedRanks

__all__ = ["PLACEMENT"]


class Colocated(SharedRanks):
    name = "colocated"
    where = "all of the LLM's ranks"
    uses_all_ranks = True
    encodes_all_first = True

    def encoder_stages(self, pp: int) -> range:
        return range(pp)

    def encoder_layouts(
        self, num_ranks: int, llm: ModuleLayout, layouts: Sequence[LayoutKey], pp_sizes: Sequence[int]
    ) -> list[ModuleLayout]:
        return [
            ModuleLayout(layout, 1, llm.num_ranks // layout.num_ranks)
            for layout in layouts
            if llm.num_ranks % layout.num_ranks == 0
        ]

    def with_encoders(
        self, pipeline: list[np.ndarray], first: int, forwards: np.ndarray, backwards: np.ndarray
    ) -> list[np.ndarray]:
        return [np.concatenate([forwards, order, backwards]) for order in pipeline]


PLACEMENT = Colocated()
