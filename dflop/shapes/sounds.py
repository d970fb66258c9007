"""Sounds' lengths and rates, read from their headers: by libsndfile, or by FFmpeg what libsndfile cannot read."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, NamedTuple

import av
import soundfile

from dflop.shapes.media import open_clip, open_medium
from dflop.shapes.media_limits import MediaLimits, unreadable
from dflop.shapes.record_media import Embedded

__all__ = ["AudioHeader", "audio_header", "open_sound"]


class AudioHeader(NamedTuple):
    """A sound's length and its own sample rate."""

    seconds: float
    rate_hz: int


class _Seekable:
    """A file for libsndfile, which looks before the beginning of a damaged one: it then stays where it is. An error
    inside libsndfile's callback would not be raised but printed."""

    def __init__(self, file: BinaryIO) -> None:
        self.read, self.readinto, self.tell, self._file = file.read, file.readinto, file.tell, file

    def seek(self, offset: int, whence: int = 0) -> None:
        with suppress(OSError, OverflowError, ValueError):
            self._file.seek(offset, whence)


@contextmanager
def open_sound(medium: Path | Embedded) -> Iterator[soundfile.SoundFile]:
    """Open a sound by libsndfile.

    Raises:
        Exception: of several kinds, if libsndfile does not know the format or the file is damaged.
    """
    with open_medium(medium) as file, soundfile.SoundFile(_Seekable(file)) as sound:
        yield sound


def audio_header(medium: Path | Embedded, limits: MediaLimits) -> AudioHeader:
    """Seconds and sample rate of a sound, by libsndfile, or by FFmpeg if libsndfile cannot read it (AAC, a clip).

    Raises:
        RecordError: unreadable_media.
    """
    num_samples, num_channels, rate_hz = _by_libsndfile(medium) or _by_ffmpeg(medium, limits)
    limits.check_sound(medium.name, num_samples, num_channels, rate_hz)
    if num_samples <= 0:
        raise unreadable(medium.name, "it is zero seconds long")
    return AudioHeader(num_samples / rate_hz, rate_hz)


def _by_libsndfile(medium: Path | Embedded) -> tuple[int, int, int] | None:
    """Samples, channels and rate of a sound. None if libsndfile cannot read it, for whatever reason."""
    try:
        with open_sound(medium) as sound:
            return (sound.frames, sound.channels, sound.samplerate) if sound.frames > 0 else None
    except Exception:
        return None


def _by_ffmpeg(medium: Path | Embedded, limits: MediaLimits) -> tuple[int, int, int]:
    with open_clip(medium, limits) as container:
        if not container.streams.audio:
            raise unreadable(medium.name, "it has no sound")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise unreadable(medium.name, "its sound is of an unknown codec")
        if stream.duration is not None:
            seconds = stream.duration * (stream.time_base or Fraction(0))
        else:
            seconds = Fraction(container.duration or 0, av.time_base)
        return round(seconds * stream.rate), stream.channels, stream.rate
