"""What a medium may ask for. Its file may lie, or be made to harm whoever opens it.

The formats that are opened are closed lists: none of them runs a program, opens a connection or names another file
(EPS is handed to Ghostscript, SDP and HLS open sockets, ffconcat reads other files). Whatever a decoder raises becomes
`RecordError("unreadable_media")`, so that a bad medium costs its record in profiling, and its sample in training.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from dflop.config import DataConfig
from dflop.models import SOUND_RATE_HZ
from dflop.shapes.record_media import RecordError

__all__ = [
    "CLIP_FORMATS",
    "MOST_FRAME_PIXELS",
    "PICTURE_FORMATS",
    "MediaLimits",
    "TookTooLong",
    "decoding",
    "unreadable",
]

# Pillow's names, where MPO counts as JPEG, and FFmpeg's.
PICTURE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
CLIP_FORMATS = (
    *("mov", "matroska", "avi", "mpegts", "mpeg", "mpegvideo", "m4v", "h264", "hevc", "ivf", "flv", "asf", "gif"),
    *("ogg", "wav", "w64", "flac", "mp3", "aac", "ac3", "eac3", "amr", "aiff", "au", "caf"),
)

# 8192 x 8192. A decoder holds up to thirty frames at once, of 1.5 bytes a pixel or more.
MOST_FRAME_PIXELS = 1 << 26

# Pixels of a JPEG times its scans, of which a usual one has ten: some 20 seconds of a core.
_MOST_SCANNED_PIXELS = 1 << 33

_LEAST_RATE_HZ, _MOST_RATE_HZ = 1_000, 768_000
# A sound of a lower rate counts as if it had this one, since it is decoded to 16 kHz whatever its own.
_COUNTED_RATE_HZ = 48_000
# A resampling filter has 20 values for each of these. 44,100 to 16,000 Hz is 160 to 441.
_MOST_IN_RATIO = 1 << 16

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """The keys of the config's `data` by these names, and when the time of a record's media ends."""

    max_image_pixels: int
    max_clip_pixels: int
    max_audio_samples: int
    max_decode_s: float
    ends: float = field(default=math.inf, compare=False)

    @classmethod
    def of(cls, data: DataConfig) -> "MediaLimits":
        return cls(data.max_image_pixels, data.max_clip_pixels, data.max_audio_samples, data.max_decode_s)

    def for_a_record(self) -> "MediaLimits":
        """The same for one record, whose media have `max_decode_s` seconds together from now on."""
        return replace(self, ends=time.monotonic() + self.max_decode_s)

    def check_picture(self, name: str, width: int, height: int) -> None:
        """Refuse a picture of no pixels or of more than `max_image_pixels`.

        Raises:
            RecordError: unreadable_media.
        """
        if width <= 0 or height <= 0:
            raise unreadable(name, "no image size in its header")
        self._check(name, f"{width} x {height} are", width * height, "pixels", "max_image_pixels")

    def check_scans(self, name: str, num_pixels: int, num_scans: int) -> None:
        """Refuse a JPEG whose scans, each of which passes over all pixels, take longer than a decoder may.

        Raises:
            RecordError: unreadable_media.
        """
        if num_pixels * num_scans > _MOST_SCANNED_PIXELS:
            raise unreadable(name, f"its {num_scans} scans of {num_pixels:,} pixels take too long to decode")

    def check_pictures(self, num_pixels: int) -> None:
        """Refuse the pictures of a record that have more pixels together than a clip or a single picture may have: a
        loader holds all of them at once.

        Raises:
            RecordError: unreadable_media.
        """
        key = "max_clip_pixels" if self.max_clip_pixels >= self.max_image_pixels else "max_image_pixels"
        most = getattr(self, key)
        if num_pixels > most:
            why = f"its pictures have {num_pixels:,} pixels together, over {most:,} (`data.{key}`)"
            raise RecordError("unreadable_media", why)

    def check_clip(self, name: str, num_frames: int, width: int, height: int) -> None:
        """Refuse a clip whose frames have more than `MOST_FRAME_PIXELS`, or the `num_frames` frames that are used more
        than `max_clip_pixels` together.

        Raises:
            RecordError: unreadable_media.
        """
        if not 0 < width * height <= MOST_FRAME_PIXELS:
            raise unreadable(name, f"its frames have {width} x {height} pixels; at most {MOST_FRAME_PIXELS:,} are read")
        said = f"{num_frames} frames of {width} x {height} are"
        self._check(name, said, num_frames * width * height, "pixels", "max_clip_pixels")

    def check_sound(self, name: str, num_samples: int, num_channels: int, rate_hz: int) -> None:
        """Refuse a sound of more than `max_audio_samples`, counted over its channels and at 48 kHz at least.

        Raises:
            RecordError: unreadable_media, also for a rate that no sound has.
        """
        if not _LEAST_RATE_HZ <= rate_hz <= _MOST_RATE_HZ:
            raise unreadable(name, f"{rate_hz:,} Hz is no sound's rate ({_LEAST_RATE_HZ:,} to {_MOST_RATE_HZ:,} Hz)")
        if max(rate_hz, SOUND_RATE_HZ) // math.gcd(rate_hz, SOUND_RATE_HZ) > _MOST_IN_RATIO:
            raise unreadable(name, f"its rate of {rate_hz:,} Hz has too little in common with {SOUND_RATE_HZ:,} Hz")
        # FFmpeg gives 0 channels where a damaged header does.
        counted = num_samples * max(1, num_channels) * max(rate_hz, _COUNTED_RATE_HZ) // rate_hz
        said = f"{num_samples / rate_hz:,.0f} s at {rate_hz:,} Hz are"
        self._check(name, said, counted, "samples", "max_audio_samples")

    def _check(self, name: str, said: str, number: int, unit: str, key: str) -> None:
        most = getattr(self, key)
        if number > most:
            raise unreadable(name, f"{said} {number:,} {unit}, over {most:,} (`data.{key}`)")

    @property
    def left_s(self) -> float:
        """The seconds that are left, always more than none."""
        return min(self.max_decode_s, max(self.ends - time.monotonic(), 1e-3))

    def check_time(self, name: str) -> None:
        """Refuse to go on with a medium when the time of its record is over.

        Raises:
            TookTooLong: the time is over.
        """
        if time.monotonic() > self.ends:
            raise self.too_long(name)

    def too_long(self, name: str) -> "TookTooLong":
        """The error for a medium for which the time of its record is not enough."""
        why = f"the media of its record take more than {self.max_decode_s:g} s to read (`data.max_decode_s`)"
        return TookTooLong("unreadable_media", f"{name}: {why}")

    def in_time(self, name: str, parts: Iterable[_Part]) -> Iterator[_Part]:
        """The parts of a medium, read or decoded one by one, until the time of its record is over.

        Nothing can interrupt a decoder in the middle of a part, so parts have to be small: packets, blocks of samples.

        Raises:
            TookTooLong: the time is over.
        """
        for part in parts:
            self.check_time(name)
            yield part


class TookTooLong(RecordError):
    """The media of a record take longer to read than they may."""


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Whatever a decoder raises inside becomes `RecordError("unreadable_media")`: no list of its errors is complete."""
    try:
        yield
    except RecordError:
        raise
    except Exception as error:
        raise unreadable(name, error) from None


def unreadable(name: str, why: Any) -> RecordError:
    """The error for a medium. Of a system's or FFmpeg's error it gives the text, without the error number and path."""
    why = getattr(why, "strerror", None) or str(why) or type(why).__name__
    return RecordError("unreadable_media", f"{name}: {' '.join(why.split())}")
