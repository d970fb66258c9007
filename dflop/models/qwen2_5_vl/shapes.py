"""Qwen2.5-VL's shape rules: from the size of a picture or clip to patches and tokens.

A picture keeps its resolution, except that its sides are rounded to whole tokens and its area is kept within limits.
Two frames of a clip become one step in time. An item of the encoder is the square of patches that becomes one token of
the LLM. In most layers a patch attends to the patches of its window, in a few to all of its picture or step. The tests
compare every number with transformers' own processor and model.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.config import AudioConfig
from dflop.models.audio import whisper_audio
from dflop.models.spec import ItemCount, ShapeRules

__all__ = ["PatchShapes", "PixelLimits", "Qwen25VlShapes", "whole_tokens"]

_MOST_ASPECT = 200


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """The least and the most pixels that a picture, or a frame, is scaled to."""

    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class PatchShapes(ShapeRules):
    """What the rules of Qwen's vision encoders share. A token has `merge_size` patches a side, and a step in time has
    `temporal_patch_size` frames."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    picture: PixelLimits

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return ("<|vision_start|>", "<|vision_end|>")

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

    @abstractmethod
    def patches_of_frame(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of each of a clip's frames.

        Raises:
            ValueError: when one side is more than 200 times the other.
        """

    def audio(self, seconds: float, audio: AudioConfig) -> ItemCount:
        return whisper_audio(seconds, audio)

    def placeholder(self, kind: str) -> str:
        return {"image": "<|image_pad|>", "video": "<|video_pad|>"}.get(kind, f"<{kind}>")

    def _of_grid(self, grid: tuple[int, int, int]) -> ItemCount:
        num_tokens = math.prod(grid) // self.merge_size**2
        return ItemCount(num_tokens, num_tokens, self.sum_sq_items(grid), grid)

    @abstractmethod
    def sum_sq_items(self, grid: tuple[int, int, int]) -> float:
        """The sum of squared numbers of items that attend to each other. The mean over the layers."""

    def run_positions(self, kind: str, count: ItemCount, frame_s: float) -> tuple[np.ndarray, int]:
        if kind == "audio":
            return np.tile(np.arange(count.num_tokens), (3, 1)), count.num_tokens
        rows, columns = (length // self.merge_size for length in count.grid[1:])
        axes = np.meshgrid(self._times(kind, count, frame_s), np.arange(rows), np.arange(columns), indexing="ij")
        return np.stack([axis.ravel() for axis in axes]), max(rows, columns)

    @abstractmethod
    def _times(self, kind: str, count: ItemCount, frame_s: float) -> np.ndarray:
        """The position in time of each step that one placeholder stands for, int64."""


@dataclass(frozen=True, kw_only=True)
class Qwen25VlShapes(PatchShapes):
    """The rules of one encoder. A window is `window_size` pixels wide. Of the `num_layers` layers, `num_full_layers`
    have full and not window attention."""

    window_size: int
    tokens_per_second: int
    num_layers: int
    num_full_layers: int
    frame: PixelLimits

    def in_text(self, kind: str, count: ItemCount, times_s: Sequence[float] = ()) -> str:
        placeholder = self.placeholder(kind)
        return placeholder if kind == "audio" else f"<|vision_start|>{placeholder}<|vision_end|>"

    def _times(self, kind: str, count: ItemCount, frame_s: float) -> np.ndarray:
        # In float32, as in transformers: other rounding would sometimes shift a step.
        seconds_a_step = np.float32(self.temporal_patch_size * frame_s)
        interval = np.float32(self.tokens_per_second) * seconds_a_step if kind == "video" else np.float32(1)
        return (np.arange(count.grid[0], dtype=np.float32) * interval).astype(np.int64)

    def patches_of_frame(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        rows, columns = whole_tokens(width, height, self.token_size, self.frame)
        return rows * self.merge_size, columns * self.merge_size

    def sum_sq_items(self, grid: tuple[int, int, int]) -> float:
        """The sum of squared numbers of items that attend to each other: those of a picture or step, or in most layers
        of a window. The mean over the layers."""
        num_steps, rows, columns = grid[0], grid[1] // self.merge_size, grid[2] // self.merge_size
        window = max(1, self.window_size // self.merge_size // self.patch_size)
        in_windows = _sum_sq_parts(rows, window) * _sum_sq_parts(columns, window)
        of_layers = self.num_full_layers * (rows * columns) ** 2
        of_layers += (self.num_layers - self.num_full_layers) * in_windows
        return num_steps * of_layers / self.num_layers


def whole_tokens(
    width: int, height: int, side: int, limits: PixelLimits, num_frames: int = 1, num_counted: int = 1
) -> tuple[int, int]:
    """Rows and columns of tokens, each `side` pixels wide and high, to which a picture is scaled.

    For a frame of a clip, `limits` are for all `num_frames` frames together. Whether they are exceeded is decided as if
    the clip had `num_counted` frames.

    Raises:
        ValueError: when one side is more than 200 times the other.
    """
    if max(width, height) > _MOST_ASPECT * min(width, height):
        raise ValueError(f"{width} x {height} pixels: one side is more than {_MOST_ASPECT} times the other")
    rows, columns = round(height / side), round(width / side)
    if num_counted * rows * columns * side**2 > limits.most:
        shrink = math.sqrt(num_frames * height * width / limits.most)
        rows, columns = (max(1, math.floor(length / shrink / side)) for length in (height, width))
    elif num_counted * rows * columns * side**2 < limits.least:
        grow = math.sqrt(limits.least / (num_frames * height * width))
        rows, columns = (math.ceil(length * grow / side) for length in (height, width))
    return rows, columns


def _sum_sq_parts(length: int, part: int) -> int:
    """The sum of the parts' squared lengths, if `length` is cut into parts of length `part` and a shorter rest."""
    return length // part * part**2 + (length % part) ** 2
