"""What a sync of a stage's gradients moves, and which shares of it hide behind computing.

Half of a sync sums gradients over the stage's replicas, in fp32 at least; the other half sends the updated parameters
back. Where replicas share parameters, only the gradients of their copies are summed, and no parameters move.
"""

from typing import NamedTuple, TypeVar

import numpy as np

from dflop.costs.model import CostModel
from dflop.costs.stage_kind import StageKind

__all__ = ["HiddenShares", "hidden_sync_shares", "sync_bytes"]

Bytes = TypeVar("Bytes", float, np.ndarray)


class HiddenShares(NamedTuple):
    """Shares of a sync: `early` may run beside the stage's last backward, `late` beside its first forward in the next
    step."""

    early: float | np.ndarray
    late: float | np.ndarray


def sync_bytes(parameter_bytes: Bytes, *, value_bytes: int, num_shards: int | np.ndarray = 1) -> Bytes:
    """Bytes that a gradient sync moves, given as the bytes of an all-reduce that takes as long.

    `parameter_bytes` are in fp32. Parameters are values of `value_bytes`, in groups of `num_shards` replicas that share
    them."""
    there_bytes, back_bytes = _moved_bytes(value_bytes, num_shards)
    return parameter_bytes / 4 * ((there_bytes + back_bytes) / 2)


def hidden_sync_shares(
    costs: CostModel, kind: StageKind, *, value_bytes: int, num_shards: int | np.ndarray = 1
) -> HiddenShares:
    """The shares of a sync of a stage of this kind; arrays if `num_shards` is one.

    A layer's gradients are summed while the layers before it compute, so what comes too late are those of the first
    layer and of the embedding before it. A layer's parameters come back while the layers before it compute. Those of
    the first layer and those outside of layers come before that, and are waited for.
    """
    whole, _ = costs.trained_and_frozen_bytes(kind)
    # A stage without trained weights, or one where nothing is computed behind the projector's gradients.
    if not whole or kind.ways.num_still == kind.num_layers:
        return HiddenShares(0.0 * num_shards, 0.0 * num_shards)
    of_part, layer = costs.trained_bytes(kind), 0.0
    if num_trained := kind.num_layers - kind.ways.num_frozen:
        layer = (whole - of_part["first"] - of_part["last"]) / num_trained
    there_bytes, back_bytes = _moved_bytes(value_bytes, num_shards)
    summed = (there_bytes + (num_shards > 1) * back_bytes) / (there_bytes + back_bytes)
    early = summed * (1 - (layer + of_part["first"]) / whole)
    return HiddenShares(early=early, late=(1 - summed) * max(0, num_trained - 1) * layer / whole)


def _moved_bytes(value_bytes: int, num_shards: int | np.ndarray) -> tuple[float, float | np.ndarray]:
    """Bytes of a parameter on each of the two halves of a gradient sync."""
    there_bytes = max(4, value_bytes)
    return there_bytes, value_bytes + (num_shards > 1) * (there_bytes - value_bytes)
