"""How sounds lie in the chunks of Qwen2.5-Omni's audio encoder, computed on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflop.models.microbatch import MediumLayout, Movable, SegmentEnds
from dflop.models.spec import ModelSpec

__all__ = ["AudioLayout", "lay_out_sounds", "num_positions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioLayout(Movable):
    """How a microbatch's chunks are arranged in the layers.

    `num_frames` [num_items] has the mel frames of each chunk. `sounds` says where the sound of each chunk ends, and
    where the chunk does. `pairs` [num_tokens] has the first of the two positions of each token.
    """

    num_frames: torch.Tensor
    sounds: SegmentEnds
    pairs: torch.Tensor


def lay_out_sounds(spec: ModelSpec, media: Sequence[MediumLayout]) -> AudioLayout:
    """The layout of a microbatch with these sounds."""
    most = spec.rules.chunk_frames
    whole, num_frames, ends, pairs = num_positions(most), [], [], []
    for medium in media:
        start = len(num_frames) * whole
        pairs.append(start + 2 * torch.arange(num_positions(medium.grid[0]) // 2))
        num_frames += [min(most, medium.grid[0] - number * most) for number in range(medium.num_items)]
    for number, own in enumerate(num_frames):
        start, held = number * whole, num_positions(own)
        ends += [start + held] * (held < whole) + [start + whole]
    return AudioLayout(num_frames=torch.tensor(num_frames), sounds=SegmentEnds(ends), pairs=torch.cat(pairs))


def num_positions(num_frames: int) -> int:
    """Positions that the convolution of stride two makes of `num_frames` mel frames."""
    return (num_frames - 1) // 2 + 1
