"""Qwen3-VL's shape rules: from the size of a picture or clip to patches and tokens.

A picture is scaled as in Qwen2.5-VL. The limits for a clip's frames are for all frames together, so that their size
depends on how many frames are used. Two frames become one step in time. In the text each step follows its time, with a
placeholder of its own; in all layers of the encoder the patches of a step attend to each other. The tests compare every
number with transformers' own processor and model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.models.qwen2_5_vl.shapes import PatchShapes, PixelLimits, whole_tokens
from dflop.models.spec import ItemCount

__all__ = ["Qwen3VlShapes"]

_BEFORE, _BEHIND = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, kw_only=True)
class Qwen3VlShapes(PatchShapes):
    """The rules of one encoder. `clip` limits the pixels of all frames of a clip together, and `max_frame_tokens`, if
    it is set, the tokens of each frame."""

    clip: PixelLimits
    max_frame_tokens: int | None = None

    def in_text(self, kind: str, count: ItemCount, times_s: Sequence[float] = ()) -> str:
        """For a clip, each step follows the mean time of its first and last frame. The vision tokens around the whole
        clip come from the chat template, and transformers' processor keeps them, too."""
        placeholder = self.placeholder(kind)
        if kind == "audio":
            return placeholder
        if kind == "image":
            return f"{_BEFORE}{placeholder}{_BEHIND}"
        assert len(times_s), "the text of a clip tells the times of its frames"
        step, num_steps = self.temporal_patch_size, count.grid[0]
        known = [*times_s, *[times_s[-1]] * (num_steps * step - len(times_s))]
        means = [(known[first] + known[first + step - 1]) / 2 for first in range(0, num_steps * step, step)]
        steps = "".join(f"<{mean:.1f} seconds>{_BEFORE}{placeholder}{_BEHIND}" for mean in means)
        return f"{_BEFORE}{steps}{_BEHIND}"

    def _times(self, kind: str, count: ItemCount, frame_s: float) -> np.ndarray:
        """That of a picture, or of one step of a clip, whose time is in the text and not in the positions."""
        return np.zeros(1, dtype=np.int64)

    def patches_of_frame(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of each of a clip's frames. A single frame counts as a whole step."""
        side, step = self.token_size, self.temporal_patch_size
        num_frames, most = max(num_frames, step), self.clip.most
        if self.max_frame_tokens is not None:
            each = min(self.max_frame_tokens * side**2, most // num_frames)
            most = max(each, int(self.clip.least * 1.05)) * num_frames
        if min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        # transformers rounds the number of steps, half a step to the even number, and compares these with the limits.
        num_counted = round(num_frames / step) * step
        limits = PixelLimits(self.clip.least, most)
        rows, columns = whole_tokens(width, height, side, limits, num_frames, num_counted)
        return rows * self.merge_size, columns * self.merge_size

    def sum_sq_items(self, grid: tuple[int, int, int]) -> float:
        """The sum of squared numbers of items that attend to each other: those of a picture, or of a step of a clip."""
        return float(grid[0] * (grid[1] * grid[2] // self.merge_size**2) ** 2)
