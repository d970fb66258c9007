"""Samples whose media could not be decoded weigh nothing in the loss.

Who decodes is seldom who computes the loss. The decoding rank tells of such samples through the process group's
key-value store, before it sends the features that stand for them; whoever computes the loss of the microbatch has by
then received what follows from these features, so asking once is enough.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from dflop.models.microbatch import TextBatch

__all__ = ["Undecodable", "without_targets_of"]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """What ranks tell each other. `batch` names a global batch, alike on all ranks, and samples are their places in
    its schedule."""

    store: dist.Store

    def tell(self, batch: str, microbatch: int, samples: Collection[int]) -> None:
        """The store has it when this returns."""
        key = self._key(batch, microbatch)
        self.store.append(key, json.dumps(sorted(samples)) + "\n")
        self.store.get(key)

    def of(self, batch: str, microbatch: int) -> set[int]:
        """The samples that were told of."""
        key = self._key(batch, microbatch)
        if not self.store.check([key]):
            return set()
        return {sample for line in self.store.get(key).splitlines() for sample in json.loads(line)}

    def _key(self, batch: str, microbatch: int) -> str:
        return f"undecodable/{batch}/{microbatch}"


def without_targets_of(batch: TextBatch, segments: Sequence[int]) -> TextBatch:
    """The microbatch with nothing to be learned from these of its packed samples."""
    is_left = torch.ones_like(batch.target_positions, dtype=torch.bool)
    for segment in segments:
        start = batch.segment_ends[segment - 1] if segment else 0
        is_left &= (batch.target_positions < start) | (batch.target_positions >= batch.segment_ends[segment])
    return replace(batch, target_positions=batch.target_positions[is_left], target_ids=batch.target_ids[is_left])
