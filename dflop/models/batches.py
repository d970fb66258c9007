"""What the stages of a model take in: one microbatch of media, one microbatch of packed text."""

from dataclasses import dataclass

import torch

__all__ = ["MediumLayout", "TextBatch", "VisualBatch"]


@dataclass(frozen=True, slots=True)
class MediumLayout:
    """How the encoder's output for one picture or clip is put together: its items, and its original size."""

    kind: str
    num_items: int
    height: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VisualBatch:
    """Media of the samples that one encoder rank computes for one microbatch.

    `items` is [num_items, 3, height, width]; `media` holds each sample's media in order, `kept_tokens`
    how many of its visual tokens the LLM sees (fewer than there are only if the sample is truncated).
    """

    items: torch.Tensor
    media: tuple[tuple[MediumLayout, ...], ...]
    kept_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextBatch:
    """Packed samples of one microbatch: [num_tokens] ids and positions, restarting at each segment.

    `visual_positions` holds, for each encoder rank, where its features go; `target_positions` are the
    positions whose next token is learned, `target_ids` those tokens.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    segment_ends: list[int]
    visual_positions: tuple[torch.Tensor, ...]
    target_positions: torch.Tensor
    target_ids: torch.Tensor

    def to(self, device: torch.device) -> "TextBatch":
        return TextBatch(
            token_ids=self.token_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            segment_ends=self.segment_ends,
            visual_positions=tuple(positions.to(device, non_blocking=True) for positions in self.visual_positions),
            target_positions=self.target_positions.to(device, non_blocking=True),
            target_ids=self.target_ids.to(device, non_blocking=True),
        )
