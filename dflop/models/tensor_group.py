"""Ranks that share tensors: who they are, and which part of a tensor each of them holds.

Tensor-parallel ranks each have a part of a parameter (`Shard`), as a plain tensor. Where replicas share parameters,
each has some rows of it, or of this part, and the parameter is a DTensor over the replicas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["ALONE", "Shard", "TensorGroup", "rows_of"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor of shape `whole` that begins at `start` along `dim`, and goes as far as the values do.

    Where the tensor is `num_stacked` ones, one behind the other along `dim` (queries, keys and values in one matrix),
    the values are this part of each of them.
    """

    dim: int
    start: int
    whole: torch.Size
    num_stacked: int = 1


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks that share a module's tensors, in order, and which of them this one is. One alone needs no group."""

    ranks: Sequence[int]
    place: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all where all know the same."""
        return self.place == 0

    def part(self, num_values: int, place: int | None = None) -> slice:
        """What of so many values this rank holds, or the one at `place`: as many as the others, the last ones fewer."""
        most = math.ceil(num_values / self.size)
        start = min((self.place if place is None else place) * most, num_values)
        return slice(start, min(start + most, num_values))


ALONE = TensorGroup((0,), 0, None)


def rows_of(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The rows of a tensor that this replica holds, and the number of the first one; all where replicas share none.

    The last axis of a DTensor's mesh are those that share: all but the last ones of them hold as many rows.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor
    mesh = tensor.device_mesh
    (*_, place), num_shards, num_rows = mesh.get_coordinate(), mesh.size(mesh.ndim - 1), tensor.shape[0]
    return min(place * math.ceil(num_rows / num_shards), num_rows), tensor.to_local()
