"""Sizes of media files, read from their headers; nothing is decoded.

A truncated or foreign file raises `RecordError("unreadable_media")`.
"""

import math
import struct
from pathlib import Path
from typing import NamedTuple

import av
import soundfile
from av.container import InputContainer
from av.error import FFmpegError
from PIL import Image

from dflop.config import VideoConfig
from dflop.data.records import RecordError

__all__ = [
    "IMAGE_ERRORS",
    "ImageSize",
    "VideoHeader",
    "audio_seconds",
    "frame_indices",
    "image_size",
    "open_clip",
    "video_header",
]


class ImageSize(NamedTuple):
    width: int
    height: int


class VideoHeader(NamedTuple):
    num_frames: int
    fps: float
    width: int
    height: int


# What Pillow raises for damaged files, by format.
IMAGE_ERRORS = (Image.DecompressionBombError, OSError, RuntimeError, SyntaxError, ValueError, struct.error)

_ORIENTATION_TAG = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
# Text chunks of a PNG in which Pillow finds an orientation, too.
_EXIF_TEXTS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")


def image_size(path: Path) -> ImageSize:
    """Width and height in pixels as the training path sees them: after the EXIF orientation is applied."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            # Pillow gives a TIFF's size upright already.
            sideways = image.format != "TIFF" and _exif(image, path).get(_ORIENTATION_TAG) in _SIDEWAYS
    except IMAGE_ERRORS as error:
        raise RecordError("unreadable_media", f"{path.name}: {error}") from None
    if width <= 0 or height <= 0:
        raise RecordError("unreadable_media", f"{path.name}: no image size in its header")
    return ImageSize(height, width) if sideways else ImageSize(width, height)


def _exif(image: Image.Image, path: Path) -> Image.Exif:
    """`image.getexif()`, which decodes a whole PNG in search of EXIF data behind its pixels, without that."""
    if image.format == "PNG" and not _has_exif_behind_pixels(path):
        return Image.Image.getexif(image)
    return image.getexif()


def _has_exif_behind_pixels(path: Path) -> bool:
    with path.open("rb") as file:
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


def open_clip(path: Path) -> InputContainer:
    """A clip's container; titles and comments in other encodings than UTF-8 are no reason to refuse it."""
    return av.open(str(path), metadata_errors="replace")


def video_header(path: Path) -> VideoHeader:
    """Frame count, rate and size of a clip's first video stream."""
    try:
        with open_clip(path) as container:
            if not container.streams.video:
                raise RecordError("unreadable_media", f"{path.name}: it has no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise RecordError("unreadable_media", f"{path.name}: its video is of an unknown codec")
            fps = float(stream.average_rate or stream.base_rate or 0)
            num_frames = stream.frames
            if not num_frames and container.duration:
                num_frames = round(container.duration / av.time_base * fps)
            header = VideoHeader(num_frames, fps, stream.width, stream.height)
    except (FFmpegError, OSError) as error:
        raise RecordError("unreadable_media", f"{path.name}: {error}") from None
    if header.num_frames <= 0 or header.fps <= 0:
        raise RecordError("unreadable_media", f"{path.name}: no frames or no frame rate in its header")
    return header


def audio_seconds(path: Path) -> float:
    try:
        info = soundfile.info(str(path))
    except (soundfile.SoundFileError, OSError) as error:
        raise RecordError("unreadable_media", f"{path.name}: {error}") from None
    if info.frames <= 0:
        raise RecordError("unreadable_media", f"{path.name}: it is zero seconds long")
    return info.frames / info.samplerate


def frame_indices(header: VideoHeader, video: VideoConfig) -> list[int]:
    """Which frames are taken: one every 1/fps seconds, spread evenly over the clip once that exceeds the cap."""
    step = max(1, round(header.fps / video.fps))
    indices = list(range(0, header.num_frames, step))
    if len(indices) <= video.max_frames:
        return indices
    if video.max_frames == 1:
        return [0]
    last = header.num_frames - 1
    return [math.floor(index * last / (video.max_frames - 1)) for index in range(video.max_frames)]
