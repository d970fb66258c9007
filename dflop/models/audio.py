"""The Whisper-style audio rule: windows of 30 s, 100 mel frames a second, two halvings.

Whisper's second convolution has stride 2, and the average pooling that Qwen2-Audio puts after it has
stride 2: 3,000 mel frames become 1,500 positions and then 750 tokens a window.
"""

import math

from dflop.models.spec import ItemCount

__all__ = ["whisper_audio"]

_WINDOW_S = 30.0
_MEL_FRAMES_PER_S = 100


def whisper_audio(seconds: float) -> ItemCount:
    """Windows and tokens of one audio file (Qwen2-Audio's length rule, applied to each window)."""
    num_windows = max(1, math.ceil(seconds / _WINDOW_S))
    num_tokens = 0
    for index in range(num_windows):
        window_s = min(_WINDOW_S, seconds - index * _WINDOW_S)
        # A frame begins every 10 ms, the last one cut off; rounding keeps 1.1 * 100 from being 110.00000000000001.
        mel_frames = max(1, math.ceil(round(window_s * _MEL_FRAMES_PER_S, 6)))
        after_convolution = (mel_frames - 1) // 2 + 1
        num_tokens += max(1, (after_convolution - 2) // 2 + 1)
    return ItemCount(num_windows, num_tokens)
