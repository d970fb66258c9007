"""A WebP picture's size from its first 30 bytes (RFC 9649). Pillow would read the whole file to find it."""

import struct
from typing import BinaryIO

from dflop.shapes.endings import is_cut_off
from dflop.shapes.record_media import ImageSize

__all__ = ["webp_size"]

_HAS_EXIF_OR_XMP = 0x08 | 0x04


def webp_size(file: BinaryIO) -> ImageSize | None:
    """The size in pixels. None if Pillow has to find it: the file is not WebP or incomplete, or its metadata may say
    that the picture is rotated."""
    head = file.read(30)
    if len(head) < 30 or head[:4] != b"RIFF" or head[8:12] != b"WEBP" or is_cut_off(file):
        return None
    size = None
    if head[12:16] == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", head[26:30])
        size = ImageSize(width & 0x3FFF, height & 0x3FFF)  # the upper two bits are a scale, which decoders ignore
    elif head[12:16] == b"VP8L" and head[20] == 0x2F:
        sides = int.from_bytes(head[21:25], "little")
        size = ImageSize(1 + (sides & 0x3FFF), 1 + (sides >> 14 & 0x3FFF))
    elif head[12:16] == b"VP8X" and not head[20] & _HAS_EXIF_OR_XMP:
        size = ImageSize(1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little"))
    return size if size and all(size) else None
