"""How pictures and clips lie in the patches of Qwen3-VL's encoder, computed on the host."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from dflop.models.microbatch import MediumLayout, Movable, SegmentEnds
from dflop.models.spec import ModelSpec

__all__ = ["VisionLayout", "lay_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionLayout(Movable):
    """How a microbatch's patches are arranged in the layers.

    `positions` [num_patches, 2] has the row and the column of each patch, and `pictures` says where pictures and steps
    end. A patch's learned position is a sum over the square grid's, at `corners` [num_patches, 4], with `weights`
    [num_patches, 4].
    """

    positions: torch.Tensor
    pictures: SegmentEnds
    corners: torch.Tensor
    weights: torch.Tensor


def lay_out(spec: ModelSpec, media: Sequence[MediumLayout]) -> VisionLayout:
    """The layout of a microbatch with these media."""
    merge_size, grids = spec.rules.merge_size, torch.tensor([medium.grid for medium in media])
    corners, weights = get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=math.isqrt(spec.hf_config["vision_config"]["num_position_embeddings"]),
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=merge_size,
    )
    return VisionLayout(
        positions=get_vision_position_ids(grids, merge_size),
        pictures=SegmentEnds(get_vision_cu_seqlens(grids).tolist()[1:]),
        corners=corners,
        weights=weights,
    )
