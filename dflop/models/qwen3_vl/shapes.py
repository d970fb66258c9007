"""Qwen3-VL's shape rules: from the size of a picture or clip to patches and tokens.

A picture is scaled as in Qwen2.5-VL. The limits for a clip's frames are for all frames together, so that their size
depends on how many frames are used. Two frames become one step in time. In the text each step follows its time, with a
placeholder of its own; in all layers of the encoder the patches of a step attend to each other. The tests compare every
number with transformers' own processor and model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.config import AudioConfig
from dflop.models.audio import whisper_audio
from dflop.models.qwen2_5_vl.shapes import PixelLimits, whole_tokens
from dflop.models.spec import ItemCount, ShapeRules

__all__ = ["Qwen3VlShapes"]

_BEFORE, _BEHIND = "<|vision_start|>", "<|vision_end|>"
_PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


@dataclass(frozen=True, kw_only=True)
class Qwen3VlShapes(ShapeRules):
    """The rules of one encoder. A token has `merge_size` patches a side. `clip` limits the pixels of all frames of a
    clip together, and `max_frame_tokens`, if it is set, the tokens of each frame."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    picture: PixelLimits
    clip: PixelLimits
    max_frame_tokens: int | None = None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (_BEFORE, _BEHIND)

    @property
    def num_position_axes(self) -> int:
        """Time, row and column."""
        return 3

    @property
    def token_size(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    def image(self, width: int, height: int, num_images: int) -> ItemCount:
        rows, columns = whole_tokens(width, height, self.token_size, self.picture)
        return self._of_grid((1, rows * self.merge_size, columns * self.merge_size))

    def video(self, num_frames: int, width: int, height: int) -> ItemCount:
        num_steps = math.ceil(num_frames / self.temporal_patch_size)
        return self._of_grid((num_steps, *self.patches_of_frame(num_frames, width, height)))

    def audio(self, seconds: float, audio: AudioConfig) -> ItemCount:
        return whisper_audio(seconds, audio)

    def placeholder(self, kind: str) -> str:
        return _PLACEHOLDERS.get(kind, f"<{kind}>")

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

    def run_positions(self, kind: str, count: ItemCount, frame_s: float) -> tuple[np.ndarray, int]:
        """The positions of a picture, or of one step of a clip. Its time is in the text, and not in the positions."""
        if kind == "audio":
            return np.tile(np.arange(count.num_tokens), (3, 1)), count.num_tokens
        rows, columns = (length // self.merge_size for length in count.grid[1:])
        axes = np.meshgrid(np.zeros(1, dtype=np.int64), np.arange(rows), np.arange(columns), indexing="ij")
        return np.stack([axis.ravel() for axis in axes]), max(rows, columns)

    def patches_of_frame(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of each of a clip's frames. A single frame counts as a whole step.

        Raises:
            ValueError: when one side is more than 200 times the other.
        """
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

    def _of_grid(self, grid: tuple[int, int, int]) -> ItemCount:
        num_tokens = math.prod(grid) // self.merge_size**2
        return ItemCount(num_tokens, num_tokens, self.sum_sq_items(grid), grid)

    def sum_sq_items(self, grid: tuple[int, int, int]) -> float:
        """The sum of squared numbers of items that attend to each other: those of a picture, or of a step of a clip."""
        return float(grid[0] * (grid[1] * grid[2] // self.merge_size**2) ** 2)
