"""Qwen2.5-Omni's shape rules: pictures and clips as Qwen2.5-VL has them, and sounds in chunks of two seconds.

A sound becomes mel frames, 100 a second; what is longer than `most_frames` (usually five minutes) is cut off. An item
of the audio encoder is a chunk of frames. A convolution makes one position of two frames, positions attend to each
other inside their chunk, and pairs of positions become tokens. The tests compare every number with transformers' own
processor and model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.config import AudioConfig
from dflop.models.qwen2_5_vl.shapes import Qwen25VlShapes
from dflop.models.spec import SOUND_RATE_HZ, ItemCount

__all__ = ["SAMPLES_A_FRAME", "Qwen25OmniShapes"]

SAMPLES_A_FRAME = 160
_PLACEHOLDERS = {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"}
_AROUND = {"audio": ("<|audio_bos|>", "<|audio_eos|>")}
_AROUND |= dict.fromkeys(("image", "video"), ("<|vision_bos|>", "<|vision_eos|>"))


@dataclass(frozen=True, kw_only=True)
class Qwen25OmniShapes(Qwen25VlShapes):
    """The rules of both encoders: a chunk has `chunk_frames` mel frames, and a sound at most `most_frames`."""

    chunk_frames: int
    most_frames: int

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return ("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>")

    def audio(self, seconds: float, audio: AudioConfig) -> ItemCount:
        """Chunks and tokens of a sound. `audio` (`data.audio`) is not used: chunks and pooling are the model's own.

        Raises:
            ValueError: when the sound is too short for a token.
        """
        num_frames = min(math.ceil(round(seconds * SOUND_RATE_HZ) / SAMPLES_A_FRAME), self.most_frames)
        num_tokens = ((num_frames - 1) // 2 + 1) // 2
        if num_tokens < 1:
            raise ValueError(f"{seconds:.3g} s of sound are too short: a token takes 0.03 s")
        return ItemCount(math.ceil(num_frames / self.chunk_frames), num_tokens, 0.0, (num_frames, 1, 1))

    def placeholder(self, kind: str) -> str:
        return _PLACEHOLDERS[kind]

    def in_text(self, kind: str, count: ItemCount, times_s: Sequence[float] = ()) -> str:
        before, behind = _AROUND[kind]
        return f"{before}{self.placeholder(kind)}{behind}"

    def run_positions(self, kind: str, count: ItemCount, frame_s: float) -> tuple[np.ndarray, int]:
        """As Qwen2.5-VL's, except for clips: steps in time are rounded otherwise, and the position of what follows is
        one more than the largest position in the clip."""
        positions, advance = super().run_positions(kind, count, frame_s)
        if kind == "video":
            # In float32, and in this order, as transformers has them.
            steps = np.arange(count.grid[0], dtype=np.float32) * np.float32(self.temporal_patch_size * frame_s)
            time = (steps * np.float32(self.tokens_per_second)).astype(np.int64)
            positions[0] = np.repeat(time, count.num_tokens // count.grid[0])
            advance = int(positions.max()) + 1
        return positions, advance
