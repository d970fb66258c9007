"""Whether a medium's file has what its header says, by small reads; nothing is decoded.

An aborted download leaves a good header without the body. Most formats mark their end or store their length. Further
bytes after that end are legal and common. A header that claims more than the file has may be an attack.
"""

import math
import os
import re
import struct
from collections.abc import Iterator
from itertools import chain, islice, takewhile
from typing import BinaryIO

from PIL import Image

__all__ = ["claims_too_much", "ends_whole", "is_cut_off"]

_END_MARKERS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b"\0;"}
_TAIL_BYTES = 64
# Boxes and bytes of headers that are looked at; an hour of video has some ten boxes and 2 MB.
_MOST_BOXES, _MOST_HEADER_BYTES = 100_000, 64 << 20
# Samples of one size (the size, the number), runs of samples in a fragment (flags, the number), and packed headers.
_SAMPLES = re.compile(rb"(stsz)....(....)(....)|(trun)....(....)|(cmov)", re.DOTALL)
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
    # It may end in bytes that are no box, or be of another format.
    known = takewhile(lambda box: box[0] in _ISO_BOXES, _boxes(file, num_bytes))
    return any(start + size > num_bytes for _, start, size in islice(known, _MOST_BOXES))


def claims_too_much(file: BinaryIO) -> bool:
    """Whether a file of ISO boxes has headers of over 64 MiB, packed ones, very many boxes, or claims more samples than
    it has bytes. FFmpeg would make an entry for each of them when it opens the file. It passes over boxes that it does
    not know, so all count here."""
    num_bytes, claimed = file.seek(0, os.SEEK_END), 0
    for number, (kind, start, size) in enumerate(_boxes(file, num_bytes)):
        if number == _MOST_BOXES:
            return True
        if kind in (b"moov", b"moof"):
            if size > _MOST_HEADER_BYTES:
                return True
            file.seek(start)
            for sizes, size_of_each, count, run, in_run, packed in _SAMPLES.findall(file.read(size)):
                if packed:
                    return True
                num_samples = int.from_bytes(count if sizes else in_run)
                claimed += num_samples if run else num_samples * int.from_bytes(size_of_each)
    return claimed > num_bytes


def _boxes(file: BinaryIO, num_bytes: int) -> Iterator[tuple[bytes, int, int]]:
    """The kind, start and size of each of a file's outer boxes, of any kind. One of size 0 has all the rest."""
    start = 0
    while start + 8 <= num_bytes:
        file.seek(start)
        size, kind, long_size = struct.unpack(">I4sQ", file.read(16).ljust(16, b"\0"))
        size = {0: num_bytes - start, 1: long_size}.get(size, size)
        if size < 8:
            return
        yield kind, start, size
        start += size
