"""Uneven pipeline splits: stages with the embedding or the head get fewer layers."""

import numpy as np

from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan.layout_key import LayoutKey
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.space import Splits, even_layers

__all__ = ["balanced_splits", "least_slowest"]


def balanced_splits(config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches) -> Splits:
    """For each LLM layout and number of stages, the split with the fastest slowest stage, unless it is the even split.

    The embedding adds time to the first stage and the head to the last, as computed for the mean sample.
    """
    splits: dict[tuple[LayoutKey, int], tuple[int, ...]] = {}
    num_layers = spec.module("llm").num_layers
    for layout in costs.layouts["llm"]:
        layer_s, first_s, last_s = batches.mean_part_s(costs, layout)
        for pp in range(2, min(num_layers, config.cluster.num_devices) + 1):
            extra_s = np.zeros(pp)
            extra_s[0] += first_s
            extra_s[-1] += last_s
            counts = least_slowest(num_layers, extra_s / layer_s)
            if counts != even_layers(num_layers, pp):
                splits[layout, pp] = counts
    return splits


def least_slowest(num_layers: int, extra: np.ndarray) -> tuple[int, ...]:
    """The number of layers in each stage, at least one, so that the largest of layers + `extra` [pp] is minimal.

    `extra` is in units of a layer's time. Ties go to the later stage, which has fewer microbatches in flight.
    """
    counts = np.ones(len(extra), dtype=int)
    for _ in range(num_layers - len(extra)):
        counts[len(extra) - 1 - int(np.argmin((counts + extra)[::-1]))] += 1
    return tuple(counts.tolist())
