"""Decoding: from the media of a sample to the items of an encoder, in the sizes that were profiled.

A medium that is no longer what was profiled does not stop a run, but it is reported:

- a medium that cannot be decoded, or not in time, becomes items of zeros, and nothing is learned from its sample;
- a picture of another size is scaled;
- a clip with fewer frames repeats its last frame, further frames are left out, and frames of another size are scaled;
- a sound of another length is cut, or padded with silence.

A missing file stops the run, unless it is a picture whose size was taken from its record, so that profiling never
looked for the file.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from dflop.config import VideoConfig
from dflop.loading.sounds import read_sound
from dflop.models import SOUND_RATE_HZ
from dflop.models.microbatch import MediaProcessor
from dflop.shapes.media import frame_indices, header_of_opened, open_clip, open_medium, open_picture
from dflop.shapes.media_limits import MediaLimits, TookTooLong, decoding
from dflop.shapes.reader import MediumSize
from dflop.shapes.record_media import Embedded, Medium, RecordError, resolve_medium

__all__ = ["MediaDecoder"]

# A tenth of a second. Smaller differences are not reported: headers of compressed sound are not exact to the sample.
_TOLERATED_SAMPLES = SOUND_RATE_HZ // 10
# What begins each scan of a JPEG; its pixels never look like it.
_SCAN, _BLOCK_BYTES = b"\xff\xda", 1 << 20


@dataclass(frozen=True, slots=True)
class MediaDecoder:
    """Decodes media and passes them to a model family's processor.

    For each medium that is not as it was profiled, a sentence is appended to `unreadable`. Media that became blank,
    items of zeros, are appended to `blank`.
    """

    processor: MediaProcessor
    video: VideoConfig
    limits: MediaLimits
    unreadable: list[str]
    blank: list[Medium]

    def items_of(
        self,
        media: Sequence[Medium],
        sizes: Sequence[MediumSize],
        root: Path,
        num_items: Sequence[int],
        frames: Sequence[range] | None = None,
    ) -> list[np.ndarray]:
        """The items of each medium, [num_items, *item_shape of the processor], as many as `num_items` says where it is
        blank. All media are of the same encoder. Only these `frames` of a clip, among those that were profiled, are
        used; by default all.

        Raises:
            RecordError: missing_media or path_escape.
        """
        known = list(enumerate(zip(media, sizes, strict=True)))
        pictures = {number: self._picture(*one, root) for number, one in known if one[0].kind == "image"}
        shown = {number: picture for number, picture in pictures.items() if picture is not None}
        made = dict(zip(shown, self.processor.images(list(shown.values())), strict=True)) if shown else {}
        for number, (medium, size) in known:
            numbers = frames[number] if frames else range(size.num_frames)
            if medium.kind == "video" and (own := self._frames(medium, resolve_medium(root, medium), size, numbers)):
                made[number] = self.processor.frames(own, size.num_frames)
            if medium.kind == "audio":
                samples = self._sound(medium, resolve_medium(root, medium), size)
                if samples is not None:
                    made[number] = self.processor.sound(samples)
        # A processor would take its time for blank media as well, e.g. ten seconds for 32 frames of 4K.
        blank = ((num, *self.processor.item_shape) for num in num_items)
        return [made[number] if number in made else np.zeros(shape, np.uint8) for number, shape in enumerate(blank)]

    def _picture(self, medium: Medium, size: MediumSize, root: Path) -> Image.Image | None:
        """A picture in the size that was profiled; None if it is blank."""
        is_trusted = medium.size is not None  # profiling did not look at the file
        try:
            file = resolve_medium(root, medium)
        except RecordError as error:
            if not is_trusted:
                raise
            return self._say_blank(medium, str(error))
        try:
            picture = _decoded_picture(file, self.limits)
        except RecordError as error:
            return self._say_blank(medium, _why(error, file))
        if picture.size == size.pixels:
            return picture
        who = "the record says" if is_trusted else "it was profiled with"
        self.unreadable.append(f"{medium.file}: {picture.size} pixels, {who} {tuple(size.pixels)}; it was scaled")
        return picture.resize(size.pixels)

    def _sound(self, medium: Medium, file: Path | Embedded, size: MediumSize) -> np.ndarray | None:
        """As many samples as were profiled, float32 [num_samples]; None if the sound is blank. Another length in the
        file is reported."""
        try:
            samples = read_sound(file, self.limits)
        except RecordError as error:
            return self._say_blank(medium, _why(error, file))
        if abs(len(samples) - size.num_samples) > _TOLERATED_SAMPLES:
            profiled, found = (count / SOUND_RATE_HZ for count in (size.num_samples, len(samples)))
            self.unreadable.append(f"{medium.file}: {found:.6g} s of sound, it was profiled with {profiled:.6g} s")
        return np.pad(samples[: size.num_samples], (0, max(0, size.num_samples - len(samples))))

    def _say_blank(self, medium: Medium, why: str) -> None:
        self.unreadable.append(f"{medium.file}: {why}; nothing is learned from its sample")
        self.blank.append(medium)

    def _frames(
        self, medium: Medium, file: Path | Embedded, size: MediumSize, numbers: range
    ) -> list[Image.Image] | None:
        """The frames of these `numbers` among those that were profiled; None if there are none. If decoding ends early,
        the last frame is repeated, and that is reported."""
        frames: list[Image.Image] = []
        why = "it has no more"
        try:
            frames += self._decoded_frames(file, size, numbers)
        except RecordError as error:
            why = _why(error, file)
            if isinstance(error, TookTooLong):  # how far it came depends on how busy the machine is
                frames.clear()
        if not frames:
            return self._say_blank(medium, f"no frame could be decoded: {why}")
        if len(frames) < len(numbers):
            decoded = f"{len(frames)} of {len(numbers)} frames could be decoded: {why}"
            self.unreadable.append(f"{file}: {decoded}; the last one is repeated")
        return frames + [frames[-1]] * (len(numbers) - len(frames))

    def _decoded_frames(self, file: Path | Embedded, size: MediumSize, numbers: range) -> Iterator[Image.Image]:
        """The frames of these `numbers` among those that are used, in the size that was profiled."""
        self.limits.check_time(file.name)
        with ExitStack() as opened:
            container = opened.enter_context(open_clip(file, self.limits))
            header, is_at_start = header_of_opened(container, file, self.limits)
            wanted = frame_indices(header, self.video)
            if len(wanted) > size.num_frames:
                said = f"{file}: {len(wanted)} frames, it was profiled with {size.num_frames}; the rest is left out"
                self.unreadable.append(said)
            if not is_at_start:
                container = opened.enter_context(open_clip(file, self.limits))
            container.streams.video[0].thread_type = "AUTO"
            packets = self.limits.in_time(file.name, container.demux(video=0))
            is_said, before, is_shown = False, None, False
            try:
                for number, frame in enumerate(_frames_at(packets, iter(wanted[: numbers.stop]))):
                    if number < numbers.start:
                        before = frame
                        continue
                    found, is_shown = (frame.width, frame.height), True
                    if found != size.pixels and not is_said:
                        said = f"{file}: frames of {found} pixels, it was profiled with {tuple(size.pixels)}"
                        self.unreadable.append(f"{said}; they were scaled")
                        is_said = True
                    yield frame.to_image(width=size.width, height=size.height)
            finally:  # it ends before these: as where all are decoded, the last one is repeated
                if before is not None and not is_shown:
                    yield before.to_image(width=size.width, height=size.height)


def _why(error: RecordError, file: Path | Embedded) -> str:
    """What is wrong with a medium, without its name, which begins the sentence."""
    return error.detail.removeprefix(f"{file.name}: ")


def _decoded_picture(file: Path | Embedded, limits: MediaLimits) -> Image.Image:
    """A whole picture, turned upright. A copy less is a gigabyte less for the largest."""
    limits.check_time(file.name)
    with decoding(file.name), open_medium(file) as opened, open_picture(opened, file.name, limits) as image:
        if image.format in ("JPEG", "MPO"):
            opened.seek(0)
            num_scans = sum(block.count(_SCAN) for block in iter(lambda: opened.read(_BLOCK_BYTES), b""))
            limits.check_scans(file.name, image.width * image.height, num_scans)
        ImageOps.exif_transpose(image, in_place=True)
        return image if image.mode == "RGB" else image.convert("RGB")


def _frames_at(packets: Iterable[Any], indices: Iterator[int]) -> Iterator[Any]:
    """The frames of these numbers, in ascending order, which may name a frame several times."""
    wanted = next(indices, None)
    frames = (frame for packet in packets for frame in packet.decode())
    for number, frame in enumerate(frames):
        while wanted == number:
            yield frame
            wanted = next(indices, None)
        if wanted is None:
            return
