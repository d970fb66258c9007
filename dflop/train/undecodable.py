"""Samples whose media could not be decoded do not count in the loss.

The rank that decodes is seldom the one that computes the loss. For each microbatch, the decoding rank writes the
numbers of such samples to the process group's key-value store, also if there are none. A rank that computes the loss
waits for that: on GPUs it may get there before the samples are decoded, since only its stream waits for features.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dflop.models.microbatch import TextBatch
from dflop.step import Node

__all__ = ["Undecodable", "without_targets_of"]

_LONGEST_WAIT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Undecodable:
    """The samples that ranks report as undecodable. `batch` names a global batch, by the same name on all ranks.
    Samples are given by their index in the batch's schedule."""

    store: dist.Store
    longest_wait: timedelta = _LONGEST_WAIT
    _told: list[str] = field(default_factory=list)

    def tell(self, batch: str, microbatch: int, encoder: Node, samples: Collection[int]) -> None:
        """Report which samples of a microbatch this encoder's node could not decode, or that it could decode all."""
        key = _key(batch, microbatch, encoder)
        self.store.set(key, json.dumps(sorted(samples)))
        self._told.append(key)

    def of(self, batch: str, microbatch: int, encoders: Sequence[Node]) -> set[int]:
        """The samples of a microbatch that these encoders' nodes report; waits until all of them have reported. All
        ranks that ask get the same answer.

        Raises:
            RuntimeError: when a report does not come in time, naming what is missing.
        """
        keys = [_key(batch, microbatch, encoder) for encoder in encoders]
        try:
            self.store.wait(keys, self.longest_wait)
        except dist.DistStoreError as error:
            raise RuntimeError(f"no word came of what could be decoded ({', '.join(keys)}): {error}") from None
        return {sample for report in self.store.multi_get(keys) for sample in json.loads(report)}

    def forget(self) -> None:
        """Take this rank's reports out of the store; call this when all ranks have read them."""
        for key in self._told:
            self.store.delete_key(key)
        self._told.clear()


def _key(batch: str, microbatch: int, encoder: Node) -> str:
    return f"undecodable/{batch}/{microbatch}/{encoder.module}/{encoder.dp_rank}"


def without_targets_of(batch: TextBatch, segments: Sequence[int]) -> TextBatch:
    """The microbatch without the targets of these of its packed samples, which are given by their index."""
    is_left = torch.ones_like(batch.target_positions, dtype=torch.bool)
    for segment in segments:
        start, end = [0, *batch.segment_ends.ends][segment : segment + 2]
        is_left &= (batch.target_positions < start) | (batch.target_positions >= end)
    return replace(batch, target_positions=batch.target_positions[is_left], target_ids=batch.target_ids[is_left])
