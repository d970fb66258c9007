"""Samples whose media could not be decoded do not count in the loss.

The rank that decodes is seldom the one that computes the loss. The decoding rank writes the numbers of such samples to
the process group's key-value store before it sends their (blank) features. A rank that computes the loss has already
received what was computed from these features, so that it needs to read the store only once.
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
    """The samples that ranks report as undecodable. `batch` names a global batch, by the same name on all ranks.
    Samples are given by their index in the batch's schedule."""

    store: dist.Store

    def tell(self, batch: str, microbatch: int, samples: Collection[int]) -> None:
        """Report samples of a microbatch; when this returns, the store has them."""
        key = self._key(batch, microbatch)
        self.store.append(key, json.dumps(sorted(samples)) + "\n")
        self.store.get(key)

    def of(self, batch: str, microbatch: int) -> set[int]:
        """The samples of a microbatch that were reported."""
        key = self._key(batch, microbatch)
        if not self.store.check([key]):
            return set()
        return {sample for line in self.store.get(key).splitlines() for sample in json.loads(line)}

    def _key(self, batch: str, microbatch: int) -> str:
        return f"undecodable/{batch}/{microbatch}"


def without_targets_of(batch: TextBatch, segments: Sequence[int]) -> TextBatch:
    """The microbatch without the targets of these of its packed samples, which are given by their index."""
    is_left = torch.ones_like(batch.target_positions, dtype=torch.bool)
    for segment in segments:
        start = batch.segment_ends[segment - 1] if segment else 0
        is_left &= (batch.target_positions < start) | (batch.target_positions >= batch.segment_ends[segment])
    return replace(batch, target_positions=batch.target_positions[is_left], target_ids=batch.target_ids[is_left])
