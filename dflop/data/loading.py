"""What a training rank feeds on: the media it encodes, or the packed text it learns, one microbatch at a time.

Indices move, pixels do not: a rank opens only the files of the samples that the schedule gives it. A
`MicrobatchLoader` is a torch dataset whose items are microbatches, so that torch's DataLoader prefetches
them in worker processes.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset

from dflop.config import VideoConfig
from dflop.data.manifests import Source, SourceRecords
from dflop.data.media import (
    IMAGE_ERRORS,
    frame_indices,
    image_size,
    open_clip,
    open_medium,
    open_picture,
    video_header,
)
from dflop.data.records import Embedded, Medium, Record, RecordError, parse_record, resolve_medium
from dflop.data.shapes import MediumShape, PlacedText, ShapeReader, expand_text
from dflop.data.text import ChatTokenizer
from dflop.models.microbatch import MediaProcessor, MediumLayout, TextBatch, VisualBatch
from dflop.runtime import UserError

__all__ = ["LoadedVisual", "MicrobatchJob", "MicrobatchLoader", "SampleRef", "TrainingRecords"]


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where a sample's record lies."""

    source: str
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchJob:
    """One microbatch of one worker: its samples, the visual tokens that each keeps, and who encodes them."""

    samples: tuple[SampleRef, ...]
    kept_vision_tokens: tuple[int, ...]
    encoder_rank: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedVisual:
    batch: VisualBatch
    unreadable: tuple[str, ...]

    def pin_memory(self) -> "LoadedVisual":
        return LoadedVisual(batch=self.batch.pin_memory(), unreadable=self.unreadable)


@dataclass
class TrainingRecords:
    """Random access to the records of all sources."""

    sources: list[Source]
    seed: int
    _opened: dict[str, SourceRecords] = field(default_factory=dict, repr=False)

    def record(self, ref: SampleRef) -> tuple[Record, Path]:
        """A sample's record and its media root.

        Raises:
            RecordError: when the record cannot be read.
            IndexError: when the manifest has no such row.
        """
        source = next(source for source in self.sources if source.name == ref.source)
        if ref.source not in self._opened:
            self._opened[ref.source] = SourceRecords(source, self.seed)
        raw = self._opened[ref.source].read(ref.row)
        return parse_record(raw, trust_sizes=source.trust_sizes), source.media_root


class _Sample(NamedTuple):
    record: Record
    media_root: Path
    shapes: list[MediumShape]
    placed: PlacedText


@dataclass
class MicrobatchLoader(Dataset):
    """`loader[job]` is a `LoadedVisual` for encoder ranks (`pixels` given) and a `TextBatch` for LLM ranks."""

    records: TrainingRecords
    reader: ShapeReader
    tokenizer_folder: Path
    max_llm_tokens: int
    num_encoder_ranks: int
    pixels: MediaProcessor | None

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self.tokenizer_folder, self.reader.rules.special_tokens)

    def __getitem__(self, job: MicrobatchJob) -> LoadedVisual | TextBatch:
        """Load a microbatch.

        Raises:
            UserError: naming the sample whose record or media are no longer what was profiled.
        """
        return self._text(job) if self.pixels is None else self._visual(job, self.pixels)

    def _profiled(self, ref: SampleRef, kept_vision_tokens: int) -> _Sample:
        """A sample whose media must have the tokens that the schedule counts on."""
        try:
            record, media_root = self.records.record(ref)
            shapes = self.reader.read_media(record, media_root)
            placed = self.reader.place_media(record, shapes)
        except (RecordError, IndexError) as error:
            raise UserError(_changed(ref, str(error))) from None
        whole = sum(placed.num_tokens)
        if whole < kept_vision_tokens or (whole > kept_vision_tokens and not self._is_truncated(placed)):
            raise UserError(_changed(ref, f"{whole} visual tokens, {kept_vision_tokens} were profiled"))
        return _Sample(record, media_root, shapes, placed)

    def _is_truncated(self, placed: PlacedText) -> bool:
        (text,) = self.tokenizer.encode([placed.turns])
        return len(text.token_ids) - len(placed.num_tokens) + sum(placed.num_tokens) > self.max_llm_tokens

    def _visual(self, job: MicrobatchJob, pixels: MediaProcessor) -> LoadedVisual:
        items: list[np.ndarray] = []
        layouts: list[tuple[MediumLayout, ...]] = []
        unreadable: list[str] = []
        for ref, kept in zip(job.samples, job.kept_vision_tokens, strict=True):
            sample = self._profiled(ref, kept)
            sample_items, layout = self._encode_media(sample, pixels, unreadable)
            items += sample_items
            layouts.append(layout)
        stacked = np.concatenate(items) if items else np.zeros((0, *pixels.item_shape), dtype=np.float32)
        batch = VisualBatch(
            items=torch.from_numpy(stacked), media=tuple(layouts), kept_tokens=tuple(job.kept_vision_tokens)
        )
        return LoadedVisual(batch=batch, unreadable=tuple(unreadable))

    def _encode_media(
        self, sample: _Sample, pixels: MediaProcessor, unreadable: list[str]
    ) -> tuple[list[np.ndarray], tuple[MediumLayout, ...]]:
        """Items of one sample's media. A medium whose header was fine but whose body is not becomes blank items."""
        media, root = sample.record.media, sample.media_root
        decoded = [self._decode_image(medium, root, unreadable) for medium in media if medium.kind == "image"]
        crops = iter(pixels.images(decoded)) if decoded else iter(())
        sizes = iter(decoded)
        items, layout = [], []
        for medium in media:
            if medium.kind == "image":
                items.append(next(crops))
                width, height = next(sizes).size
            else:
                frames = _decode_frames(resolve_medium(root, medium), self.reader.video, unreadable)
                items.append(pixels.frames(frames))
                width, height = frames[0].size
            layout.append(MediumLayout(medium.kind, len(items[-1]), height, width))
        return items, tuple(layout)

    def _decode_image(self, medium: Medium, media_root: Path, unreadable: list[str]) -> Image.Image:
        """The picture, of the size that was profiled: one that was trusted to have another size is scaled to it."""
        try:
            with (
                open_medium(resolve_medium(media_root, medium)) as file,
                open_picture(file, str(medium.file), self.reader.max_image_pixels) as image,
            ):
                picture = ImageOps.exif_transpose(image).convert("RGB")
        except (*IMAGE_ERRORS, RecordError) as error:
            unreadable.append(f"{medium.file}: {error}")
            size = medium.size or image_size(resolve_medium(media_root, medium), self.reader.max_image_pixels)
            return Image.new("RGB", tuple(size))
        if medium.size is not None and picture.size != medium.size:
            unreadable.append(f"{medium.file}: {picture.size} pixels, the record says {tuple(medium.size)}")
            return picture.resize(medium.size)
        return picture

    def _text(self, job: MicrobatchJob) -> TextBatch:
        samples = [self._profiled(ref, kept) for ref, kept in zip(job.samples, job.kept_vision_tokens, strict=True)]
        texts = self.tokenizer.encode([sample.placed.turns for sample in samples])
        ids, positions, targets, is_visual, encoders = [], [], [], [], []
        for sample, text, encoder_rank in zip(samples, texts, job.encoder_rank, strict=True):
            token_ids, is_target = expand_text(text, sample.placed.num_tokens, self.max_llm_tokens)
            ids.append(token_ids)
            targets.append(is_target)
            positions.append(np.arange(len(token_ids)))
            is_visual.append(np.isin(token_ids, list(self.tokenizer.placeholder_ids.values())))
            encoders.append(np.full(len(token_ids), encoder_rank))
        token_ids, is_target = np.concatenate(ids), np.concatenate(targets)
        visual, encoder = np.concatenate(is_visual), np.concatenate(encoders)
        # The token at position i is predicted from position i - 1; a segment's first token is never a target.
        learned = np.flatnonzero(is_target)
        return TextBatch(
            token_ids=torch.from_numpy(token_ids),
            position_ids=torch.from_numpy(np.concatenate(positions)),
            segment_ends=list(itertools.accumulate(len(part) for part in ids)),
            visual_positions=tuple(
                torch.from_numpy(np.flatnonzero(visual & (encoder == rank))) for rank in range(self.num_encoder_ranks)
            ),
            target_positions=torch.from_numpy(learned - 1),
            target_ids=torch.from_numpy(token_ids[learned]),
        )


def _changed(ref: SampleRef, what: str) -> str:
    return (
        f"record {ref.row} of source `{ref.source}` has changed since it was profiled ({what}); "
        "delete results/<run>/shapes and run the workflow again"
    )


def _decode_frames(file: Path | Embedded, video: VideoConfig, unreadable: list[str]) -> list[Image.Image]:
    """Exactly the frames that were profiled; where decoding ends early the last one is repeated, and that is said."""
    header = video_header(file)
    wanted = frame_indices(header, video)
    frames: list[Image.Image] = []
    why = "it has no more"
    try:
        with open_clip(file) as container:
            container.streams.video[0].thread_type = "AUTO"
            pending = iter(wanted)
            for image in _frames_at(container, pending):
                frames.append(image)
    except (av.error.FFmpegError, OSError) as error:
        why = error.strerror or str(error)
    if len(frames) < len(wanted):
        unreadable.append(f"{file}: {len(frames)} of {len(wanted)} frames could be decoded: {why}")
    if not frames:
        frames.append(Image.new("RGB", (header.width, header.height)))
    return frames + [frames[-1]] * (len(wanted) - len(frames))


def _frames_at(container: Any, indices: Iterator[int]) -> Iterator[Image.Image]:
    wanted = next(indices, None)
    for number, frame in enumerate(container.decode(video=0)):
        while wanted == number:
            yield frame.to_image()
            wanted = next(indices, None)
        if wanted is None:
            return
