"""Sounds, decoded as Whisper-like encoders take them: one channel of float32 at 16 kHz.

libsndfile reads WAV, FLAC, MP3 and Ogg; FFmpeg reads what libsndfile cannot (AAC, a clip's sound). Both read block by
block, so that memory follows what is in the file, not what its header says.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import av
import numpy as np

from dflop.models import SOUND_RATE_HZ
from dflop.shapes.media import open_clip
from dflop.shapes.media_limits import MediaLimits, TookTooLong, unreadable
from dflop.shapes.record_media import Embedded, RecordError
from dflop.shapes.sounds import open_sound

__all__ = ["read_sound"]

# Samples of all channels that are decoded at once.
_BLOCK = 1 << 20
# Times the loudest of a usual sound. Squared, as a spectrum has it, a larger one is no number any more.
_LOUDEST = 1e9


def read_sound(medium: Path | Embedded, limits: MediaLimits) -> np.ndarray:
    """The whole sound, float32 [num_samples]: the mean of its channels.

    Raises:
        RecordError: unreadable_media, when no sample can be decoded, one is no number, or a limit is exceeded.
    """
    limits.check_time(medium.name)
    try:
        samples = _by_libsndfile(medium, limits)
    except RecordError:
        raise
    except Exception:  # whatever it is, FFmpeg may know better
        samples = _by_ffmpeg(medium, limits)
    if not len(samples):
        raise unreadable(medium.name, "no sound could be decoded")
    if not np.abs(samples).max() < _LOUDEST:
        raise unreadable(medium.name, "some of its samples are no numbers of a sound")
    return samples


def _by_libsndfile(medium: Path | Embedded, limits: MediaLimits) -> np.ndarray:
    with open_sound(medium) as sound:
        limits.check_sound(medium.name, sound.frames, sound.channels, sound.samplerate)
        blocks = sound.blocks(max(1, _BLOCK // sound.channels), dtype="float32", always_2d=True)
        mixed = (block.mean(axis=1) for block in limits.in_time(medium.name, blocks))
        return _joined(_resampled(mixed, sound.samplerate))


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *parts])


def _resampled(blocks: Iterable[np.ndarray], rate_hz: int) -> Iterator[np.ndarray]:
    """A sound at 16 kHz, in blocks again. Its number of samples is rounded up, as profiling counts them."""
    from scipy.signal import resample_poly

    if rate_hz == SOUND_RATE_HZ:
        yield from blocks
        return
    up, down = (rate // math.gcd(rate_hz, SOUND_RATE_HZ) for rate in (SOUND_RATE_HZ, rate_hz))
    # How far scipy's filter reaches to each side. All cuts are at multiples of `down`, where a new sample begins.
    reach = down * math.ceil((10 * max(up, down) / up + 1) / down)
    held, begin = np.zeros(0, np.float32), 0
    for block in blocks:
        held = np.concatenate([held, block])
        end = (len(held) - reach) // down * down
        if end > begin:
            yield resample_poly(held, up, down)[begin * up // down : end * up // down].astype(np.float32)
            begin = min(end, reach)
            held = held[end - begin :]
    yield resample_poly(held, up, down)[begin * up // down :].astype(np.float32)


def _by_ffmpeg(medium: Path | Embedded, limits: MediaLimits) -> np.ndarray:
    """A sound that breaks off, or goes on beyond a limit, counts as far as it was read, e.g. 3 of 5 minutes."""
    parts: list[np.ndarray] = []
    try:
        parts += _decoded(medium, limits)
    except RecordError as error:
        if not parts or isinstance(error, TookTooLong):  # how far it came depends on how busy the machine is
            raise
    return _joined(parts)


def _decoded(medium: Path | Embedded, limits: MediaLimits) -> Iterator[np.ndarray]:
    num_samples = 0
    with open_clip(medium, limits) as container:
        if not container.streams.audio:
            raise unreadable(medium.name, "it has no sound")
        resampler = av.AudioResampler(format="flt", layout="mono", rate=SOUND_RATE_HZ)
        for packet in limits.in_time(medium.name, container.demux(audio=0)):
            for frame in packet.decode():
                num_samples += frame.samples
                limits.check_sound(medium.name, num_samples, 1, frame.sample_rate)
                yield from (made.to_ndarray()[0] for made in resampler.resample(frame))
        yield from (made.to_ndarray()[0] for made in resampler.resample(None))
