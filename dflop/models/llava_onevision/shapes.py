"""LLaVA-OneVision's shape rules: from the size of a picture or clip to crops and tokens.

A picture alone in its sample is cut into the grid of crops that fits it best, plus one crop of the whole picture.
The encoder sees all of these crops. The LLM sees fewer tokens: padding is cut off, and features of more than
`max_crops` crops are scaled down. A picture among others is one square crop. Frames are pooled by two.
The tests compare every number with transformers' own processor and model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dflop.config import AudioConfig
from dflop.models.audio import whisper_audio
from dflop.models.spec import ItemCount, ShapeRules

__all__ = ["LlavaOnevisionShapes"]


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionShapes(ShapeRules):
    """The rules for one encoder resolution. `grid_pinpoints` are `(height, width)` in pixels."""

    image_size: int
    patch_size: int
    grid_pinpoints: tuple[tuple[int, int], ...]
    max_crops: int

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return ()

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens_per_item(self) -> int:
        """Patches of one crop, on which the encoder computes; the LLM may see fewer."""
        return self.patches_per_side**2

    def image(self, width: int, height: int, num_images: int) -> ItemCount:
        if num_images > 1:
            return ItemCount(1, self.tokens_per_item + 1)
        return _single_image(self, width, height)

    def video(self, num_frames: int, width: int, height: int) -> ItemCount:
        pooled_side = math.ceil(self.patches_per_side / 2)
        return ItemCount(num_frames, num_frames * pooled_side**2 + 1)

    def audio(self, seconds: float, audio: AudioConfig) -> ItemCount:
        return whisper_audio(seconds, audio)

    def placeholder(self, kind: str) -> str:
        return f"<{kind}>"

    def in_text(self, kind: str, count: ItemCount, times_s: Sequence[float] = ()) -> str:
        return self.placeholder(kind)


@lru_cache(maxsize=1 << 16)
def _single_image(rules: LlavaOnevisionShapes, width: int, height: int) -> ItemCount:
    grid_height, grid_width = _best_grid(rules.grid_pinpoints, width, height)
    rows, columns = grid_height // rules.image_size, grid_width // rules.image_size
    side = rules.patches_per_side
    patch_rows, patch_columns = _without_padding(side * rows, side * columns, width, height)
    excess = math.sqrt(patch_rows * patch_columns / (rules.max_crops * side**2))
    if excess > 1.1:
        patch_rows, patch_columns = int(patch_rows // excess), int(patch_columns // excess)
    newlines = patch_rows
    return ItemCount(rows * columns + 1, side**2 + patch_rows * patch_columns + newlines)


def _best_grid(pinpoints: tuple[tuple[int, int], ...], width: int, height: int) -> tuple[int, int]:
    """The pinpoint (height, width) that keeps most of the picture's pixels and, among equals, wastes the least area."""
    best, best_kept, best_waste = pinpoints[0], -1, math.inf
    for grid_height, grid_width in pinpoints:
        scale = min(grid_width / width, grid_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = grid_width * grid_height - kept
        if kept > best_kept or (kept == best_kept and waste < best_waste):
            best, best_kept, best_waste = (grid_height, grid_width), kept, waste
    return best


def _without_padding(patch_rows: int, patch_columns: int, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of patches that are left when the padding of the fitted picture is cut off."""
    if width / height > patch_columns / patch_rows:
        kept = int(round(height * (patch_columns / width), 7))
        return patch_rows - 2 * ((patch_rows - kept) // 2), patch_columns
    kept = int(round(width * (patch_rows / height), 7))
    return patch_rows, patch_columns - 2 * ((patch_columns - kept) // 2)
