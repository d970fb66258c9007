"""Monolithic: each encoder sits on the ranks of the LLM's first pipeline stage, with its tp and dp.

This is what frameworks do that do not look at the data. The first stage encodes each microbatch right before its own
forward, and runs the encoders' backward right after its own backward.
"""

from collections.abc import Sequence

import numpy as np

from dflop.parallelism.passes import BACKWARD, FORWARD
from dflop.parallelism.placements.placement import SharedRanks

__all__ = ["PLACEMENT"]


class Monolithic(SharedRanks):
    name = "monolithic"
    where = "the ranks of the LLM's first stage"
    has_bridges = False

    def encoder_stages(self, pp: int) -> range:
        return range(1)

    def encoder_layouts(
        self, num_ranks: int, llm: tuple[int, int, int], tp_sizes: Sequence[int], pp_sizes: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        tp, _, dp = llm
        return [(tp, 1, dp)] if tp in tp_sizes else []

    def with_encoders(
        self, pipeline: list[np.ndarray], first: int, forwards: np.ndarray, backwards: np.ndarray
    ) -> list[np.ndarray]:
        parts = []
        for item in pipeline[0]:
            own = item[1] == first
            if own and item[0] == FORWARD:
                parts.append(forwards[forwards[:, 2] == item[2]])
            parts.append(item[None])
            if own and item[0] == BACKWARD:
                parts.append(backwards[backwards[:, 2] == item[2]])
        return [np.concatenate(parts), *pipeline[1:]]


PLACEMENT = Monolithic()
