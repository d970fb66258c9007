"""How pictures and clips lie in the patches of Qwen2.5-VL's encoder, computed on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from dflop.models.microbatch import MediumLayout, Movable, SegmentEnds
from dflop.models.spec import ModelSpec

__all__ = ["VisionLayout", "lay_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionLayout(Movable):
    """How a microbatch's patches are arranged in the layers.

    `order` [num_items] has the original index of each item when items are ordered by windows, and `places` [num_items]
    the place of each item in that order. `positions` [num_patches, 2] has the row and the column of each patch, in that
    order. `windows` and `pictures` say where windows, and pictures or steps, end in the patches.
    """

    order: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    windows: SegmentEnds
    pictures: SegmentEnds


def lay_out(spec: ModelSpec, media: Sequence[MediumLayout]) -> VisionLayout:
    """The layout of a microbatch with these media."""
    rules, grids = spec.rules, torch.tensor([medium.grid for medium in media])
    order, windows = get_vision_window_index(
        grids, rules.merge_size, window_size=rules.window_size, patch_size=rules.patch_size
    )
    positions = get_vision_position_ids(grids, rules.merge_size).unflatten(0, (len(order), -1))
    return VisionLayout(
        order=order,
        places=torch.argsort(order),
        positions=positions[order].flatten(0, 1),
        windows=SegmentEnds(windows.tolist()[1:]),
        pictures=SegmentEnds(get_vision_cu_seqlens(grids).tolist()[1:]),
    )
