"""A tied embedding and head, if the LLM's first and last pipeline stage are on different ranks.

The first stage owns the matrix and its moments; the last one has a copy. The copy's gradient is added to the owner's
before gradients are summed over replicas, and the copy gets the owner's values after each update, so that both always
have the same bits.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Ends", "TiedEmbedding"]


@dataclass(frozen=True, slots=True)
class Ends:
    """The ranks of one replica's first stage (`owner`) and last stage (`copy`), and a process group of the two."""

    owner: int
    copy: int
    group: dist.ProcessGroup


class TiedEmbedding:
    """One end's view of the matrix, [vocab_size, hidden_size]."""

    def __init__(self, weight: nn.Parameter, ends: Ends) -> None:
        self.weight, self._ends = weight, ends
        self.is_copy = dist.get_rank() == ends.copy
        if self.is_copy and weight.requires_grad:
            weight.grad = torch.zeros_like(weight)  # as wide as the owner's: the weight may be narrowed later

    def zero_grad(self) -> None:
        """Zero the copy's gradient. The owner's is zeroed by the optimiser."""
        if self.is_copy and self.weight.grad is not None:
            self.weight.grad.zero_()

    def give_gradient(self) -> None:
        """Add the copy's gradient to the owner's; both ends must call this."""
        if self.weight.requires_grad:
            dist.reduce(self.weight.grad, dst=self._ends.owner, group=self._ends.group)

    def give_values(self) -> None:
        """Send the owner's values to the copy; both ends must call this."""
        if self.weight.requires_grad:
            dist.broadcast(self.weight.data, src=self._ends.owner, group=self._ends.group)
