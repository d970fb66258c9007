"""What a model makes of one record: the items and tokens of its media, and its text with the media in it.

Profiling and training both read records through this file, so that training makes what was profiled. Profiling reads
the media's headers; training takes the sizes that profiling stored.
"""

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflop.config import DataConfig
from dflop.models import SOUND_RATE_HZ, ItemCount, ShapeRules
from dflop.shapes.media import VideoHeader, frame_indices, image_size, video_header
from dflop.shapes.media_limits import MediaLimits
from dflop.shapes.record_media import MEDIA_KINDS, Embedded, ImageSize, Medium, RecordError, resolve_medium
from dflop.shapes.records import Record, Turn
from dflop.shapes.sounds import AudioHeader, audio_header
from dflop.shapes.text import TokenizedText

__all__ = ["MediumShape", "MediumSize", "PlacedText", "ShapeReader", "expand_text", "place_positions"]

# The most that a column of 32 bits holds: half an hour of microseconds, 37 hours of sound, 2,147 frames a second.
_MOST = 2**31 - 1

# How many headers `remembering` keeps: 20 MB in all.
_MOST_HEADERS = 1 << 16
# A medium that was given up with less of its time left than this share was given up for its time.
_NO_TIME = 0.05

_PLACEHOLDER = re.compile("|".join(f"<{kind}>" for kind in MEDIA_KINDS))


class MediumShape(NamedTuple):
    """What one medium becomes (`count`), and what its header says: the picture size in pixels, or the sound's length.

    For a clip, `num_frames` is the number of frames that are used, `frame_us` the mean microseconds between two of
    them, and `rate_uhz` the clip's own frame rate in µHz. For a sound, `num_samples` counts samples at 16 kHz;
    `seconds` and `rate_hz` (its own sample rate) are known only if the header was read just now.
    """

    kind: str
    count: ItemCount
    size: ImageSize = ImageSize(0, 0)
    num_frames: int = 0
    frame_us: int = 0
    num_samples: int = 0
    rate_uhz: int = 0
    seconds: float = 0.0
    rate_hz: int | None = None


class MediumSize(NamedTuple):
    """What profiling stores of a medium: one row of `MediaSizes.values`. `num_frames` is 0 for all but clips; for the
    other fields see `MediumShape`."""

    width: int
    height: int
    num_frames: int
    frame_us: int = 0
    num_samples: int = 0
    rate_uhz: int = 0

    @property
    def pixels(self) -> ImageSize:
        return ImageSize(self.width, self.height)


class PlacedText(NamedTuple):
    """A record's turns, with its media as the model's family writes them. Both lists have one entry a placeholder: the
    medium that it stands for, and the number of that medium's tokens that it stands for."""

    turns: tuple[Turn, ...]
    media: list[MediumShape]
    num_tokens: list[int]


_Header = ImageSize | VideoHeader | AudioHeader


def _header_of(medium: Medium, media_root: Path, limits: MediaLimits) -> _Header:
    file = resolve_medium(media_root, medium)
    limits.check_time(file.name)
    read = {"image": image_size, "video": video_header, "audio": audio_header}[medium.kind]
    return read(file, limits)


@dataclass(frozen=True)
class ShapeReader:
    """Reads records by a model's `rules` and the limits and rates of the config's `data`."""

    rules: ShapeRules
    data: DataConfig
    read_header: Callable[[Medium, Path, MediaLimits], _Header] = _header_of

    @cached_property
    def limits(self) -> MediaLimits:
        return MediaLimits.of(self.data)

    def remembering(self) -> "ShapeReader":
        """A copy for one pass over many records: it remembers headers, and what is wrong with unreadable files, so that
        a file that many records name is opened once. One that took too long is opened again where it has more time."""
        too_long_s: dict[tuple[Medium, Path], float] = {}

        @lru_cache(_MOST_HEADERS)
        def outcome(medium: Medium, media_root: Path, limits: MediaLimits) -> _Header | RecordError:
            begin = time.monotonic()
            try:
                return _header_of(medium, media_root, limits)
            except RecordError as error:
                if limits.left_s < _NO_TIME * limits.max_decode_s:
                    too_long_s[medium, media_root] = time.monotonic() - begin
                    raise
                if error.reason != "unreadable_media":
                    raise
                return RecordError(error.reason, error.detail)  # a copy, as a traceback keeps the medium in memory

        def read_header(medium: Medium, media_root: Path, limits: MediaLimits) -> _Header:
            if not isinstance(medium.file, str):
                return _header_of(medium, media_root, limits)
            if too_long_s.get((medium, media_root), 0.0) > (1 - _NO_TIME) * limits.left_s:
                raise limits.too_long(medium.file)
            found = outcome(medium, media_root, limits)
            if isinstance(found, RecordError):
                raise RecordError(found.reason, found.detail)
            return found

        return replace(self, read_header=read_header)

    def read_media(self, record: Record, media_root: Path) -> list[MediumShape]:
        """The shape of each of a record's media, in order, from their headers.

        Raises:
            RecordError: missing_media, path_escape or unreadable_media.
        """
        num_images = sum(medium.kind == "image" for medium in record.media)
        limits = self.limits.for_a_record()
        shapes = [self._read_medium(medium, media_root, num_images, limits) for medium in record.media]
        self.limits.check_pictures(sum(math.prod(shape.size) for shape in shapes if shape.kind == "image"))
        return shapes

    def stored_media(self, record: Record, sizes: Sequence[MediumSize]) -> list[MediumShape]:
        """What `read_media` gave for a record when it was profiled, from the sizes that were stored then.

        Raises:
            RecordError: bad_record, when the record has another number of media now.
        """
        if len(sizes) != len(record.media):
            raise RecordError("bad_record", f"{len(record.media)} media, {len(sizes)} were profiled")
        num_images = sum(medium.kind == "image" for medium in record.media)
        return [self.stored(medium.kind, size, num_images) for medium, size in zip(record.media, sizes, strict=True)]

    def place_media(self, record: Record, shapes: Sequence[MediumShape]) -> PlacedText:
        """The record's text with its media in it.

        Raises:
            RecordError: too_long, for a text of more than `data.max_text_bytes`; placeholder_mismatch, for a text that
                already holds a token by which the family stands for media.
        """
        num_bytes = sum([_num_bytes(turn.content) for turn in record.turns])
        if num_bytes > self.data.max_text_bytes:
            raise RecordError(
                "too_long", f"{num_bytes:,} bytes of text, over {self.data.max_text_bytes:,} (`data.max_text_bytes`)"
            )
        for kind in MEDIA_KINDS:
            token = self.rules.placeholder(kind)
            if token != f"<{kind}>" and any(token in turn.content for turn in record.turns):
                detail = f"its text holds {token}, which stands for media; write <{kind}> where one is, or leave it out"
                raise RecordError("placeholder_mismatch", detail)
        media: list[MediumShape] = []
        num_tokens: list[int] = []
        if not shapes:
            return PlacedText(record.turns, media, num_tokens)
        remaining = iter(shapes)

        def in_text(_: re.Match) -> str:
            shape = next(remaining)
            text = self.rules.in_text(shape.kind, shape.count, self._times_s(shape))
            num_placeholders = text.count(self.rules.placeholder(shape.kind))
            media.extend([shape] * num_placeholders)
            num_tokens.extend([shape.count.num_tokens // num_placeholders] * num_placeholders)
            return text

        turns = tuple(Turn(turn.role, _PLACEHOLDER.sub(in_text, turn.content)) for turn in record.turns)
        return PlacedText(turns, media, num_tokens)

    def _read_medium(self, medium: Medium, media_root: Path, num_images: int, limits: MediaLimits) -> MediumShape:
        if medium.size is not None:
            _refuse_escape(medium, media_root)
            limits.check_picture(str(medium.file), *medium.size)
            return self._image(medium.size, num_images)
        header = self.read_header(medium, media_root, limits)
        if isinstance(header, ImageSize):
            return self._image(header, num_images)
        if isinstance(header, VideoHeader):
            num_frames = len(frame_indices(header, self.data.video))
            limits.check_clip(str(medium.file), num_frames, header.width, header.height)
            frame_us = min(round(1e6 * header.num_frames / header.fps / num_frames), _MOST)
            rate_uhz = min(round(1e6 * header.fps), _MOST)
            return self._video(ImageSize(header.width, header.height), num_frames, frame_us, rate_uhz)
        seconds, rate_hz = header
        num_samples = -(-round(seconds * rate_hz) * SOUND_RATE_HZ // rate_hz)
        return self._sound(min(num_samples, _MOST))._replace(seconds=seconds, rate_hz=rate_hz)

    def stored(self, kind: str, size: MediumSize, num_images: int) -> MediumShape:
        """The shape of a medium whose size was stored, in a sample with `num_images` pictures."""
        if kind == "image":
            return self._image(size.pixels, num_images)
        if kind == "video":
            return self._video(size.pixels, size.num_frames, size.frame_us, size.rate_uhz)
        return self._sound(size.num_samples)

    def _image(self, size: ImageSize, num_images: int) -> MediumShape:
        return MediumShape("image", self._count(self.rules.image, *size, num_images), size)

    def _video(self, size: ImageSize, num_frames: int, frame_us: int, rate_uhz: int) -> MediumShape:
        count = self._count(self.rules.video, num_frames, *size)
        return MediumShape("video", count, size, num_frames, frame_us, rate_uhz=rate_uhz)

    def _sound(self, num_samples: int) -> MediumShape:
        count = self._count(self.rules.audio, num_samples / SOUND_RATE_HZ, self.data.audio)
        return MediumShape("audio", count, num_samples=num_samples)

    def _times_s(self, shape: MediumShape) -> list[float]:
        """The times in the clip of the frames that are used, in seconds; empty if the clip's frame rate is unknown."""
        if not shape.rate_uhz:
            return []
        rate_hz = shape.rate_uhz / 1e6
        length_s = shape.num_frames * shape.frame_us / 1e6
        header = VideoHeader(round(length_s * rate_hz), rate_hz, *shape.size)
        return [index / rate_hz for index in frame_indices(header, self.data.video)]

    def _count(self, rule: Callable[..., ItemCount], *sizes: Any) -> ItemCount:
        try:
            return rule(*sizes)
        except ValueError as error:  # a size that the family cannot use
            raise RecordError("unreadable_media", str(error)) from None


def expand_text(text: TokenizedText, num_tokens: Iterable[int], max_llm_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Put media into a text: each placeholder becomes as many copies of itself as its medium has tokens.

    `num_tokens` has one number a placeholder. Returns the token ids, int64 [num_tokens], and the target mask, bool
    [num_tokens], both cut after `max_llm_tokens`.
    """
    repeats = np.ones(len(text.token_ids), dtype=np.int64)
    repeats[text.placeholders] = np.minimum(list(num_tokens), max_llm_tokens)  # more would only be cut off
    token_ids = np.repeat(text.token_ids, repeats)[:max_llm_tokens]
    return token_ids, np.repeat(text.is_target, repeats)[:max_llm_tokens]


def place_positions(text: TokenizedText, placed: PlacedText, rules: ShapeRules, max_llm_tokens: int) -> np.ndarray:
    """The position ids of a sample's tokens once its media are in, [num_position_axes, num_tokens], cut as
    `expand_text` cuts the tokens. Text advances by one a token on all axes, and media by the family's rules."""
    parts, now, behind = [], 0, 0
    for place, medium in zip(text.placeholders, placed.media, strict=True):
        parts.append(np.tile(np.arange(now, now + place - behind), (rules.num_position_axes, 1)))
        now += int(place) - behind
        positions, advance = rules.run_positions(medium.kind, medium.count, medium.frame_us / 1e6)
        parts.append(now + positions)
        now, behind = now + advance, int(place) + 1
    parts.append(np.tile(np.arange(now, now + len(text.token_ids) - behind), (rules.num_position_axes, 1)))
    return np.concatenate(parts, axis=1)[:, :max_llm_tokens]


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _refuse_escape(medium: Medium, media_root: Path) -> None:
    """Refuse a path outside the media root by its text alone: if sizes are trusted, the file system is not asked.

    Raises:
        RecordError: path_escape.
    """
    if not isinstance(medium.file, Embedded) and os.path.normpath(medium.file).startswith(("..", "/")):
        root = os.path.abspath(media_root)
        if not os.path.normpath(os.path.join(root, medium.file)).startswith(root.rstrip("/") + "/"):
            raise RecordError("path_escape", f"{medium.file} lies outside the media root {media_root}")
