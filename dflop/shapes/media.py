"""Sizes of media, read from their headers. Only a picture whose file does not end as its format requires is decoded.

A medium is a file, or bytes inside its manifest (`Embedded`). A picture that is truncated, and any medium that is empty
or of an unknown format, raises `RecordError("unreadable_media")`. A clip that was cut off counts with the frames that
are left.

Pictures are read by Pillow, as in training. `imagesize` takes 15 µs a picture instead of 100, but it ignores the
orientation that PNG and WebP may hold, does not know AVIF, and does not notice damaged pictures.
"""

import math
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import av
from av.container import InputContainer
from av.error import ArgumentError
from PIL import Image, UnidentifiedImageError

from dflop.config import VideoConfig
from dflop.shapes.endings import claims_too_much, ends_whole, is_cut_off
from dflop.shapes.media_limits import (
    CLIP_FORMATS,
    MOST_FRAME_PIXELS,
    PICTURE_FORMATS,
    MediaLimits,
    decoding,
    unreadable,
)
from dflop.shapes.record_media import Embedded, ImageSize
from dflop.shapes.webp import webp_size

__all__ = [
    "VideoHeader",
    "frame_indices",
    "header_of_opened",
    "image_size",
    "open_clip",
    "open_medium",
    "open_picture",
    "video_header",
]


class VideoHeader(NamedTuple):
    """A clip's number of frames, frames per second, and size in pixels."""

    num_frames: int
    fps: float
    width: int
    height: int


class _InTime:
    """A record's picture, read until the time of its media is over. Pillow reads part by part, e.g. chunk by chunk."""

    def __init__(self, file: BinaryIO, name: str, limits: MediaLimits) -> None:
        self._file, self._name, self._limits = file, name, limits

    def read(self, *num_bytes: int) -> bytes:
        self._limits.check_time(self._name)
        return self._file.read(*num_bytes)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._file, attribute)


_pillows_limit = threading.Lock()
# Files up to this size cannot have so many parts that they take long. Looking at the time takes 20 us a picture.
_LARGE_BYTES = 1 << 20

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


def open_picture(file: BinaryIO, name: str, limits: MediaLimits) -> Image.Image:
    """Open a picture within the limits; only its header is read. To be called inside `decoding`, until it is loaded.

    Pillow's own limit against decompression bombs would refuse large scans, or warn of them. That limit is a setting of
    the whole process, so it is switched off only while the header is read.

    Raises:
        RecordError: unreadable_media, when the picture has more pixels, or the time of its record is over.
        UnidentifiedImageError: when the file is not a picture of `PICTURE_FORMATS`.
    """
    if file.seek(0, os.SEEK_END) > _LARGE_BYTES:
        file = _InTime(file, name, limits)
    with _pillows_limit:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(file, formats=PICTURE_FORMATS)
        finally:
            Image.MAX_IMAGE_PIXELS = limit
    limits.check_picture(name, *image.size)
    return image


def image_size(medium: Path | Embedded, limits: MediaLimits) -> ImageSize:
    """A picture's width and height in pixels as training sees them: after the EXIF orientation is applied.

    Raises:
        RecordError: unreadable_media.
    """
    with decoding(medium.name), open_medium(medium) as file:
        try:
            size = webp_size(file) or _size_by_pillow(medium, file, limits)
        except UnidentifiedImageError:
            raise unreadable(medium.name, _no_picture(medium)) from None
    limits.check_picture(medium.name, *size)
    return size


def _size_by_pillow(medium: Path | Embedded, file: BinaryIO, limits: MediaLimits) -> ImageSize:
    file.seek(0)
    with open_picture(file, medium.name, limits) as image:
        # For a TIFF, Pillow gives the size with the orientation already applied.
        sideways = image.format != "TIFF" and _exif(image, medium, limits).get(_ORIENTATION_TAG) in _SIDEWAYS
        size = ImageSize(image.height, image.width) if sideways else ImageSize(image.width, image.height)
        is_whole = ends_whole(image, file)
    if not is_whole:
        with open_medium(medium) as again, open_picture(again, medium.name, limits) as image:
            image.load()
    return size


def _no_picture(medium: Path | Embedded) -> str:
    with open_medium(medium) as file:
        head = file.read(12)
    if head[4:8] == b"ftyp" and head[8:] in _HEIC_BRANDS:
        return "it is a HEIC picture, which Pillow cannot read; convert it to JPEG (pillow-heif can)"
    return f"it is no picture of a known format ({', '.join(PICTURE_FORMATS)})"


def _exif(image: Image.Image, medium: Path | Embedded, limits: MediaLimits) -> Image.Exif:
    """`image.getexif()`, but without decoding a whole PNG in search of EXIF data behind its pixels."""
    if image.format == "PNG" and not _has_exif_behind_pixels(medium, limits):
        return Image.Image.getexif(image)
    return image.getexif()


def _has_exif_behind_pixels(medium: Path | Embedded, limits: MediaLimits) -> bool:
    with open_medium(medium) as file:
        file.seek(len(b"\x89PNG\r\n\x1a\n"))
        is_behind = False
        while len(head := file.read(8)) == 8:
            limits.check_time(medium.name)
            length, kind = struct.unpack(">I4s", head)
            next_chunk = file.tell() + length + 4
            is_behind = is_behind or kind == b"IDAT"
            is_text = kind in (b"tEXt", b"zTXt", b"iTXt")
            if is_behind and (kind == b"eXIf" or (is_text and file.read(32).startswith(_EXIF_TEXTS))):
                return True
            file.seek(next_chunk)
    return False


@contextmanager
def open_clip(medium: Path | Embedded, limits: MediaLimits) -> Iterator[InputContainer]:
    """Open a clip's or sound's container, of `CLIP_FORMATS`. Titles and comments that are not UTF-8 are no reason to
    refuse it.

    Raises:
        RecordError: unreadable_media, also for whatever is raised while it is open.
    """
    options = {
        "format_whitelist": ",".join(CLIP_FORMATS),
        "protocol_whitelist": "file",
        "max_pixels": str(MOST_FRAME_PIXELS),
    }
    with decoding(medium.name):
        with open_medium(medium) as opened:
            if claims_too_much(opened):
                raise unreadable(medium.name, "its header claims more samples than the file has bytes, or is packed")
        file = medium.open() if isinstance(medium, Embedded) else str(medium)
        try:
            container = av.open(file, metadata_errors="replace", options=options, timeout=limits.left_s)
        except ArgumentError:  # what FFmpeg says of a format that is not listed
            raise unreadable(medium.name, f"it is of no known format ({', '.join(CLIP_FORMATS)})") from None
        with container:
            for stream in container.streams.video:
                if stream.codec_context is not None:
                    stream.codec_context.options = {"max_pixels": options["max_pixels"]}
            yield container


def video_header(medium: Path | Embedded, limits: MediaLimits) -> VideoHeader:
    """Frame count, rate and size of a clip's first video stream.

    Raises:
        RecordError: unreadable_media.
    """
    with open_clip(medium, limits) as container:
        header, _ = header_of_opened(container, medium, limits)
    return header


def header_of_opened(
    container: InputContainer, medium: Path | Embedded, limits: MediaLimits
) -> tuple[VideoHeader, bool]:
    """The header of an open clip, and whether the container is still at its beginning.

    If the header does not give the number of frames (Matroska, WebM), or the file is shorter than its header says, the
    frames are counted by reading through the file. Nothing is decoded.

    Raises:
        RecordError: unreadable_media, when the clip has no video, frames or frame rate, or its codec is unknown.
    """
    if not container.streams.video:
        raise unreadable(medium.name, "it has no video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise unreadable(medium.name, "its video is of an unknown codec")
    fps = float(stream.average_rate or stream.base_rate or 0)
    num_frames = stream.frames
    is_counted = bool(num_frames) and not _is_cut_off(medium)
    if not is_counted:
        num_frames = sum(
            packet.size > 0 and not packet.is_corrupt for packet in limits.in_time(medium.name, container.demux(stream))
        )
    if num_frames <= 0 or fps <= 0:
        raise unreadable(medium.name, "it has no frames or no frame rate")
    return VideoHeader(num_frames, fps, stream.width, stream.height), is_counted


def _is_cut_off(medium: Path | Embedded) -> bool:
    with open_medium(medium) as file:
        return is_cut_off(file)


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
