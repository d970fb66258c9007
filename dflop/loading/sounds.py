"""Sounds, decoded as Whisper-like encoders take them: one channel of float32 at 16 kHz.

libsndfile reads WAV, FLAC, MP3 and Ogg; FFmpeg reads what libsndfile cannot (AAC, a clip's sound).
"""

import math
from pathlib import Path

import av
import numpy as np
import soundfile
from av.error import FFmpegError

from dflop.models import SOUND_RATE_HZ
from dflop.shapes.media import open_clip, open_medium
from dflop.shapes.records import Embedded, RecordError

__all__ = ["read_sound"]


def read_sound(medium: Path | Embedded) -> np.ndarray:
    """The whole sound, float32 [num_samples]: the mean of its channels.

    Raises:
        RecordError: unreadable_media, when no sample can be decoded.
    """
    try:
        with open_medium(medium) as file:
            channels, rate_hz = soundfile.read(file, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError, TypeError):  # TypeError: a name that ends in .raw
        return _by_ffmpeg(medium)
    if not len(channels):
        raise RecordError("unreadable_media", f"{medium.name}: no sound could be decoded")
    return _resampled(channels.mean(axis=1), rate_hz)


def _resampled(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """The sound at 16 kHz. Its number of samples is rounded up, as profiling counts them."""
    from scipy.signal import resample_poly

    if rate_hz == SOUND_RATE_HZ:
        return samples
    shared = math.gcd(rate_hz, SOUND_RATE_HZ)
    return resample_poly(samples, SOUND_RATE_HZ // shared, rate_hz // shared).astype(np.float32)


def _by_ffmpeg(medium: Path | Embedded) -> np.ndarray:
    parts: list[np.ndarray] = []
    why = "it has no sound"
    try:
        with open_clip(medium) as container:
            if container.streams.audio:
                resampler = av.AudioResampler(format="flt", layout="mono", rate=SOUND_RATE_HZ)
                for frame in container.decode(audio=0):
                    parts += [made.to_ndarray()[0] for made in resampler.resample(frame)]
                parts += [made.to_ndarray()[0] for made in resampler.resample(None)]
    except (FFmpegError, OSError) as error:
        why = error.strerror or str(error)
    if not parts:
        raise RecordError("unreadable_media", f"{medium.name}: no sound could be decoded: {why}")
    return np.concatenate(parts)
