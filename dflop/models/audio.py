"""The Whisper-style audio rule: windows, 100 mel frames a second, a convolution of stride 2, then pooling.

With `data.audio`'s defaults it is Qwen2-Audio's: a window of 30 s has 3,000 mel frames, which become 1,500
positions and, averaged by two, 750 tokens.
"""

import math

from dflop.config import AudioConfig
from dflop.models.spec import ItemCount

__all__ = ["whisper_audio"]

_MEL_FRAMES_PER_S = 100


def whisper_audio(seconds: float, audio: AudioConfig) -> ItemCount:
    """Windows (items) and tokens of one audio file, by Qwen2-Audio's length rule, applied to each window."""
    num_windows = max(1, math.ceil(seconds / audio.window_s))
    last_s = seconds - (num_windows - 1) * audio.window_s
    num_tokens = (num_windows - 1) * _window_tokens(audio.window_s, audio.pooling)
    return ItemCount(num_windows, num_tokens + _window_tokens(last_s, audio.pooling))


def _window_tokens(seconds: float, pooling: int) -> int:
    # A frame begins every 10 ms; the last may be incomplete. Rounding keeps 1.1 * 100 from being 110.00000000000001.
    mel_frames = max(1, math.ceil(round(seconds * _MEL_FRAMES_PER_S, 6)))
    after_convolution = (mel_frames - 1) // 2 + 1
    return max(1, after_convolution // pooling)
