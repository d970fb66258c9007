"""Qwen3-VL's shape rules: from the size of a picture or clip to patches and tokens.

A picture is scaled as Qwen2.5-VL scales it. A clip's frames have limits for all of them together, so that their size
depends on how many are taken. Two frames become one step in time; in the text each step stands alone, behind its time,
and in the encoder its patches attend to each other, in all layers. The tests compare every number with transformers'
own processor and model.
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
    """The rules of one encoder: a token has `merge_size` patches a side; `clip` limits the pixels of all frames of a
    clip, and `max_frame_tokens`, where it is set, the tokens of each."""

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
        """Of a clip each step behind the mean of its first and its last frame's times, and marks around the whole, as
        transformers' processor leaves them of the chat template."""
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
        """A picture's, or those of one step of a clip: what its text says is when it is seen."""
        if kind == "audio":
            return np.tile(np.arange(count.num_tokens), (3, 1)), count.num_tokens
        rows, columns = (length // self.merge_size for length in count.grid[1:])
        axes = np.meshgrid(np.zeros(1, dtype=np.int64), np.arange(rows), np.arange(columns), indexing="ij")
        return np.stack([axis.ravel() for axis in axes]), max(rows, columns)

    def patches_of_frame(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of each of a clip's frames. One frame alone is taken twice.

        Raises:
            ValueError: when it is more than 200 times as long as wide.
        """
        side, step = self.token_size, self.temporal_patch_size
        num_frames, most = max(num_frames, step), self.clip.most
        if self.max_frame_tokens is not None:
            each = min(self.max_frame_tokens * side**2, most // num_frames)
            most = max(each, int(self.clip.least * 1.05)) * num_frames
        if min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        # transformers rounds half of a step to the even number of steps, and holds the limits against these.
        num_counted = round(num_frames / step) * step
        limits = PixelLimits(self.clip.least, most)
        rows, columns = whole_tokens(width, height, side, limits, num_frames, num_counted)
        return rows * self.merge_size, columns * self.merge_size

    def _of_grid(self, grid: tuple[int, int, int]) -> ItemCount:
        num_tokens = math.prod(grid) // self.merge_size**2
        return ItemCount(num_tokens, num_tokens, self.sum_sq_items(grid), grid)

    def sum_sq_items(self, grid: tuple[int, int, int]) -> float:
        """Squared items of what attends to itself: a picture, or a step of a clip."""
        return float(grid[0] * (grid[1] * grid[2] // self.merge_size**2) ** 2)
