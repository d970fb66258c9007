"""Sizes of media, read from their headers. Only a picture whose file does not end as its format requires is decoded.

A medium is a file, or bytes inside its manifest (`Embedded`). A picture that is truncated, and any medium that is empty
or of an unknown format, raises `RecordError("unreadable_media")`. A clip that was cut off counts with the frames that
are left.

Pictures are read by Pillow, as in training. `imagesize` takes 15 µs a picture instead of 100, but it ignores the
orientation that PNG and WebP may hold, does not know AVIF, and does not notice damaged pictures.
"""

import math
import struct
import threading
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, NamedTuple

import av
import soundfile
from av.container import InputContainer
from av.error import FFmpegError
from PIL import Image, UnidentifiedImageError

from dflop.config import VideoConfig
from dflop.shapes.endings import ends_whole, is_cut_off
from dflop.shapes.records import Embedded, ImageSize, RecordError
from dflop.shapes.webp import webp_size

__all__ = [
    "IMAGE_ERRORS",
    "AudioHeader",
    "VideoHeader",
    "audio_header",
    "frame_indices",
    "header_of_opened",
    "image_size",
    "open_clip",
    "open_medium",
    "open_picture",
    "too_many_pixels",
    "video_header",
]


class VideoHeader(NamedTuple):
    """A clip's number of frames, frames per second, and size in pixels."""

    num_frames: int
    fps: float
    width: int
    height: int


class AudioHeader(NamedTuple):
    """A sound's length and its own sample rate."""

    seconds: float
    rate_hz: int


# What Pillow raises for damaged files, by format (ArithmeticError, AttributeError, TypeError: TIFF and SPIDER files).
IMAGE_ERRORS = (
    ArithmeticError,
    AttributeError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Image.DecompressionBombError,
    struct.error,
)

_pillows_limit = threading.Lock()

# A week. A header that claims more is damaged, and would count as many audio windows as it claims.
_MOST_SECONDS = 7 * 24 * 3600

_ORIENTATION_TAG = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
# How text chunks of a PNG begin in which Pillow looks for an orientation.
_EXIF_TEXTS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")


def open_medium(medium: Path | Embedded) -> BinaryIO:
    """A medium's bytes as a seekable file.

    Raises:
        OSError: when the file cannot be opened.
    """
    return medium.open() if isinstance(medium, Embedded) else medium.open("rb")


def open_picture(file: BinaryIO, name: str, max_pixels: int) -> Image.Image:
    """Open a picture of at most `max_pixels` pixels; only its header is read.

    Pillow's own limit against decompression bombs would refuse large scans, or warn of them. That limit is a setting of
    the whole process, so it is switched off only while the header is read.

    Raises:
        RecordError: unreadable_media, when the picture has more pixels.
        UnidentifiedImageError: when the file is not a picture. A damaged one may raise any of `IMAGE_ERRORS`.
    """
    with _pillows_limit:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(file)
        finally:
            Image.MAX_IMAGE_PIXELS = limit
    if image.width * image.height > max_pixels:
        raise too_many_pixels(name, *image.size, max_pixels)
    return image


def image_size(medium: Path | Embedded, max_pixels: int) -> ImageSize:
    """A picture's width and height in pixels as training sees them: after the EXIF orientation is applied.

    Raises:
        RecordError: unreadable_media.
    """
    try:
        with open_medium(medium) as file:
            size = webp_size(file) or _size_by_pillow(medium, file, max_pixels)
    except UnidentifiedImageError:
        raise _unreadable(medium, _no_picture(medium)) from None
    except IMAGE_ERRORS as error:
        raise _unreadable(medium, error) from None
    if size.width <= 0 or size.height <= 0:
        raise _unreadable(medium, "no image size in its header")
    if size.width * size.height > max_pixels:
        raise too_many_pixels(medium.name, *size, max_pixels)
    return size


def _size_by_pillow(medium: Path | Embedded, file: BinaryIO, max_pixels: int) -> ImageSize:
    file.seek(0)
    with open_picture(file, medium.name, max_pixels) as image:
        # For a TIFF, Pillow gives the size with the orientation already applied.
        sideways = image.format != "TIFF" and _exif(image, medium).get(_ORIENTATION_TAG) in _SIDEWAYS
        size = ImageSize(image.height, image.width) if sideways else ImageSize(image.width, image.height)
        is_whole = ends_whole(image, file)
    if not is_whole:
        with open_medium(medium) as again, open_picture(again, medium.name, max_pixels) as image:
            image.load()
    return size


def too_many_pixels(name: str, width: int, height: int, max_pixels: int) -> RecordError:
    """The error for a picture of more than `max_pixels` pixels."""
    detail = f"{width} x {height} are {width * height:,} pixels, over {max_pixels:,} (`data.max_image_pixels`)"
    return RecordError("unreadable_media", f"{name}: {detail}")


def _unreadable(medium: Path | Embedded, why: object) -> RecordError:
    """The error for a medium. Of a system's or FFmpeg's error it gives the text, without the error number and path."""
    why = getattr(why, "strerror", None) or why
    return RecordError("unreadable_media", f"{medium.name}: {' '.join(str(why).split())}")


def _no_picture(medium: Path | Embedded) -> str:
    with open_medium(medium) as file:
        head = file.read(12)
    if head[4:8] == b"ftyp" and head[8:] in _HEIC_BRANDS:
        return "it is a HEIC picture, which Pillow cannot read; convert it to JPEG (pillow-heif can)"
    return "it is no picture of a known format"


def _exif(image: Image.Image, medium: Path | Embedded) -> Image.Exif:
    """`image.getexif()`, but without decoding a whole PNG in search of EXIF data behind its pixels."""
    if image.format == "PNG" and not _has_exif_behind_pixels(medium):
        return Image.Image.getexif(image)
    return image.getexif()


def _has_exif_behind_pixels(medium: Path | Embedded) -> bool:
    with open_medium(medium) as file:
        file.seek(len(b"\x89PNG\r\n\x1a\n"))
        is_behind = False
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            next_chunk = file.tell() + length + 4
            is_behind = is_behind or kind == b"IDAT"
            is_text = kind in (b"tEXt", b"zTXt", b"iTXt")
            if is_behind and (kind == b"eXIf" or (is_text and file.read(32).startswith(_EXIF_TEXTS))):
                return True
            file.seek(next_chunk)
    return False


def open_clip(medium: Path | Embedded) -> InputContainer:
    """Open a clip's container. Titles and comments that are not UTF-8 are no reason to refuse it."""
    file = medium.open() if isinstance(medium, Embedded) else str(medium)
    return av.open(file, metadata_errors="replace")


def video_header(medium: Path | Embedded) -> VideoHeader:
    """Frame count, rate and size of a clip's first video stream.

    Raises:
        RecordError: unreadable_media.
    """
    try:
        with open_clip(medium) as container:
            header, _ = header_of_opened(container, medium)
    except (FFmpegError, OSError) as error:
        raise _unreadable(medium, error) from None
    return header


def header_of_opened(container: InputContainer, medium: Path | Embedded) -> tuple[VideoHeader, bool]:
    """The header of an open clip, and whether the container is still at its beginning.

    If the header does not give the number of frames (Matroska, WebM), or the file is shorter than its header says, the
    frames are counted by reading through the file. Nothing is decoded.

    Raises:
        RecordError: unreadable_media, when the clip has no video, frames or frame rate, or its codec is unknown.
        FFmpegError: when the file cannot be read through.
    """
    if not container.streams.video:
        raise _unreadable(medium, "it has no video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise _unreadable(medium, "its video is of an unknown codec")
    fps = float(stream.average_rate or stream.base_rate or 0)
    num_frames = stream.frames
    is_counted = bool(num_frames) and not _is_cut_off(medium)
    if not is_counted:
        num_frames = sum(packet.size > 0 and not packet.is_corrupt for packet in container.demux(stream))
    if num_frames <= 0 or fps <= 0:
        raise _unreadable(medium, "it has no frames or no frame rate")
    return VideoHeader(num_frames, fps, stream.width, stream.height), is_counted


def _is_cut_off(medium: Path | Embedded) -> bool:
    with open_medium(medium) as file:
        return is_cut_off(file)


def audio_header(medium: Path | Embedded) -> AudioHeader:
    """Seconds and sample rate of a sound, by libsndfile, or by FFmpeg if libsndfile cannot read it (AAC, a clip).

    Raises:
        RecordError: unreadable_media.
    """
    try:
        with open_medium(medium) as file:
            info = soundfile.info(file)
            header = AudioHeader(info.frames / info.samplerate, info.samplerate)
    except (soundfile.SoundFileError, OSError, TypeError, ZeroDivisionError):  # TypeError: a name that ends in .raw
        header = None
    if header is None or header.seconds <= 0:
        header = _sound_stream(medium)
    if header.seconds <= 0:
        raise _unreadable(medium, "it is zero seconds long")
    if header.seconds > _MOST_SECONDS:
        raise _unreadable(medium, f"its header says that it lasts {header.seconds:,.0f} seconds")
    return header


def _sound_stream(medium: Path | Embedded) -> AudioHeader:
    try:
        with open_clip(medium) as container:
            if not container.streams.audio:
                raise _unreadable(medium, "it has no sound")
            stream = container.streams.audio[0]
            if stream.codec_context is None:
                raise _unreadable(medium, "its sound is of an unknown codec")
            if stream.duration is not None:
                seconds = float(stream.duration * (stream.time_base or Fraction(0)))
            else:
                seconds = (container.duration or 0) / av.time_base
            return AudioHeader(seconds, stream.rate)
    except (FFmpegError, OSError) as error:
        raise _unreadable(medium, error) from None


def frame_indices(header: VideoHeader, video: VideoConfig) -> list[int]:
    """The frames of a clip that are used: about `video.fps` a second, or `video.max_frames` frames, spread evenly over
    the clip, if that would be more."""
    step = max(1, round(header.fps / video.fps))
    indices = range(0, header.num_frames, step)
    if len(indices) <= video.max_frames:
        return list(indices)
    if video.max_frames == 1:
        return [0]
    last = header.num_frames - 1
    return [math.floor(index * last / (video.max_frames - 1)) for index in range(video.max_frames)]
