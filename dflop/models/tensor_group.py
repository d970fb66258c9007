"""Ranks that share tensors: which ranks they are, and which part of a tensor each of them holds.

Each tensor-parallel rank has a part of a parameter (`Shard`), as a plain tensor. If replicas shard parameters, each has
some rows of the parameter, or of this part, and the parameter is a DTensor over the replicas.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["ALONE", "Shard", "TensorGroup", "rows_of"]


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor of shape `whole`: it begins at index `start` of `dim`, and is as long as the rank's own
    values.

    If the tensor is `num_stacked` tensors, one after the other along `dim` (queries, keys and values in one matrix),
    the rank has this part of each of them.
    """

    dim: int
    start: int
    whole: torch.Size
    num_stacked: int = 1


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks that share a module's tensors, in order, and this rank's `place` among them. A single rank has no
    process group."""

    ranks: tuple[int, ...]
    place: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for all of them where all have the same values."""
        return self.place == 0

    def part(self, num_values: int, place: int | None = None) -> slice:
        """Which of `num_values` values this rank holds, or the rank at `place`. All hold the same number, except that
        the last ones may hold fewer."""
        most = math.ceil(num_values / self.size)
        start = min((self.place if place is None else place) * most, num_values)
        return slice(start, min(start + most, num_values))


ALONE = TensorGroup((0,), 0, None)


def rows_of(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The index of the first row of a tensor that this replica holds, and these rows; all rows if it is not sharded.

    Replicas along the last axis of a DTensor's mesh share its rows. All hold the same number, except that the last ones
    may hold fewer.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor
    mesh = tensor.device_mesh
    (*_, place), num_shards, num_rows = mesh.get_coordinate(), mesh.size(mesh.ndim - 1), tensor.shape[0]
    return min(place * math.ceil(num_rows / num_shards), num_rows), tensor.to_local()
