"""Monolithic: each encoder sits on the ranks of the LLM's first pipeline stage, with its tp and dp.

This is what frameworks do that do not look at the data. The first stage encodes each microbatch right before its own
forward, and runs the encoders' backward right after its own backward.
"""

from collections.abc import Sequence

import numpy as np

from dflop.plan.layout_key import LayoutKey, ModuleLayout
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.plan.placements.placement import SharedRanks

__all__ = ["PLACEMENT"]


class Monolithic(SharedRanks):
    name = "monolithic"
    where = "the ranks of the LLM's first stage"
    has_bridges = False

    def encoder_stages(self, pp: int) -> range:
        return range(1)

    def encoder_layouts(
        self, num_ranks: int, llm: ModuleLayout, layouts: Sequence[LayoutKey], pp_sizes: Sequence[int]
    ) -> list[ModuleLayout]:
        return [ModuleLayout(llm.layout, 1, llm.dp)] if llm.layout in layouts else []

    def with_encoders(
        self, pipeline: list[np.ndarray], first: int, forwards: np.ndarray, backwards: np.ndarray
    ) -> list[np.ndarray]:
        order = pipeline[0]
        # Behind each LLM computation comes the encoders' backward for it, then their forward for the next one.
        behind = 2 * _places(order, first, BACKWARD)[backwards[:, 2]] + 2
        before = 2 * _places(order, first, FORWARD)[forwards[:, 2]]
        keys = np.concatenate([behind, before, 2 * np.arange(len(order)) + 1])
        merged = np.concatenate([backwards, forwards, order])[np.argsort(keys, kind="stable")]
        return [merged, *pipeline[1:]]


def _places(order: np.ndarray, stage: int, direction: int) -> np.ndarray:
    """Where in the order the stage's pass over each microbatch stands, [num_microbatches]."""
    places = np.flatnonzero((order[:, 0] == direction) & (order[:, 1] == stage))
    return places[np.argsort(order[places, 2])]


PLACEMENT = Monolithic()
