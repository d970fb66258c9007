"""Whether a medium's file is complete, by a small read at its end; nothing is decoded.

An aborted download leaves a good header without the body. Most formats mark their end or store their length. Further
bytes after that end are legal and common.
"""

import math
import os
import struct
from itertools import chain
from typing import BinaryIO

from PIL import Image

__all__ = ["ends_whole", "is_cut_off"]

_END_MARKERS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b"\0;"}
_TAIL_BYTES = 64
# Offsets and lengths of a TIFF's strips, or of its tiles.
_TIFF_PARTS = ((273, 279), (324, 325))
_ISO_BOXES = frozenset(
    (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"meta", b"mfra", b"sidx", b"free", b"skip", b"wide", b"uuid")
)


def ends_whole(image: Image.Image, file: BinaryIO) -> bool:
    """Whether a picture's file ends as its format requires. If not, or for another format, only decoding can tell."""
    if image.format in _END_MARKERS:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, num_bytes - _TAIL_BYTES))
        return _END_MARKERS[image.format] in file.read(_TAIL_BYTES)
    if image.format == "TIFF":
        tags = image.tag_v2
        parts = chain(*(zip(tags.get(at, ()), tags.get(size, ()), strict=False) for at, size in _TIFF_PARTS))
        return max(map(sum, parts), default=math.inf) <= file.seek(0, os.SEEK_END)
    return image.format in ("AVIF", "WEBP") and not is_cut_off(file)


def is_cut_off(file: BinaryIO) -> bool:
    """Whether a RIFF file (AVI, WebP) or a file of ISO boxes (MP4, MOV, AVIF) is shorter than its headers say."""
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(8)
    if head.startswith(b"RIFF"):
        return 8 + int.from_bytes(head[4:], "little") > num_bytes
    box = 0
    while box + 8 <= num_bytes:
        file.seek(box)
        size, kind, long_size = struct.unpack(">I4sQ", file.read(16).ljust(16, b"\0"))
        size = long_size if size == 1 else size
        if kind not in _ISO_BOXES or size < 8:  # bytes after the last box, another format, or a box up to the end
            return False
        box += size
    return box > num_bytes
