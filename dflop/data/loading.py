"""What a node of training feeds on, one microbatch at a time: the media it encodes, or the packed text it learns.

Indices move, pixels do not: encoders open the media of the samples that the schedule gives them, the LLM's first and
last stage read text, and the stages between read nothing. How many tokens a medium takes in the text follows from the
sizes that were profiled, so nobody reads a header again; an encoder sees a changed medium when it decodes it. A
`MicrobatchLoader` is a torch dataset whose items are microbatches, so that torch's DataLoader prefetches them in
worker processes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from dflop.data.decoding import MediaDecoder
from dflop.data.manifests import Source, SourceRecords
from dflop.data.records import Record, RecordError, parse_record
from dflop.data.shapes import MediumSize, PlacedText, ShapeReader, expand_text
from dflop.data.text import ChatTokenizer
from dflop.models.microbatch import MediaProcessor, MediumLayout, TextBatch, VisualBatch
from dflop.runtime import UserError

__all__ = [
    "LoadedVisual",
    "MicrobatchJob",
    "MicrobatchLoader",
    "SampleRef",
    "SegmentsJob",
    "TrainingRecords",
    "segments_of",
]


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where a sample's record lies."""

    source: str
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchJob:
    """One microbatch of one node: its samples, their media's profiled sizes, the visual tokens that each keeps, all of
    its tokens in the LLM, and who encodes its media."""

    samples: tuple[SampleRef, ...]
    media: tuple[tuple[MediumSize, ...], ...]
    kept_vision_tokens: tuple[int, ...]
    llm_tokens: tuple[int, ...]
    encoder_rank: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentsJob:
    """One microbatch of an LLM stage that is neither the first nor the last: how long each sample is, in tokens."""

    llm_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedVisual:
    """A microbatch of media; `unreadable` are sentences on those that are not what was profiled."""

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
            UserError: when no source has that name.
        """
        source = next((source for source in self.sources if source.name == ref.source), None)
        if source is None:
            raise UserError(
                f"the schedule names a sample of source `{ref.source}`, which `data.sources` does not have; make "
                "shapes.duckdb again with `dflop merge-shapes`"
            )
        if ref.source not in self._opened:
            self._opened[ref.source] = SourceRecords(source, self.seed)
        raw = self._opened[ref.source].read(ref.row)
        return parse_record(raw, trust_sizes=source.trust_sizes), source.media_root


class _Sample(NamedTuple):
    record: Record
    media_root: Path
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

    def _profiled(self, ref: SampleRef, sizes: Sequence[MediumSize], kept_vision_tokens: int) -> _Sample:
        """A sample with its media in their places, which must have the tokens that the schedule counts on."""
        try:
            record, media_root = self.records.record(ref)
            placed = self.reader.place_media(record, self.reader.stored_media(record, sizes))
        except (RecordError, IndexError) as error:
            raise UserError(_changed(ref, str(error))) from None
        whole = sum(placed.num_tokens)
        if whole < kept_vision_tokens or (whole > kept_vision_tokens and not self._is_truncated(placed)):
            raise UserError(_changed(ref, f"{whole} visual tokens, {kept_vision_tokens} were profiled"))
        return _Sample(record, media_root, placed)

    def _is_truncated(self, placed: PlacedText) -> bool:
        (text,) = self.tokenizer.encode([placed.turns])
        return len(text.token_ids) - len(placed.num_tokens) + sum(placed.num_tokens) > self.max_llm_tokens

    def _visual(self, job: MicrobatchJob, pixels: MediaProcessor) -> LoadedVisual:
        items: list[np.ndarray] = []
        layouts: list[tuple[MediumLayout, ...]] = []
        unreadable: list[str] = []
        decoder = MediaDecoder(pixels, self.reader.video, self.reader.max_image_pixels, unreadable)
        for ref, sizes, kept in zip(job.samples, job.media, job.kept_vision_tokens, strict=True):
            sample = self._profiled(ref, sizes, kept)
            try:
                sample_items, layout = decoder.items_of(sample.record.media, sizes, sample.media_root)
            except RecordError as error:
                raise UserError(_changed(ref, str(error))) from None
            items += sample_items
            layouts.append(layout)
        stacked = np.concatenate(items) if items else np.zeros((0, *pixels.item_shape), dtype=np.float32)
        batch = VisualBatch(
            items=torch.from_numpy(stacked), media=tuple(layouts), kept_tokens=tuple(job.kept_vision_tokens)
        )
        return LoadedVisual(batch=batch, unreadable=tuple(unreadable))

    def _text(self, job: MicrobatchJob) -> TextBatch:
        samples = [
            self._profiled(ref, sizes, kept)
            for ref, sizes, kept in zip(job.samples, job.media, job.kept_vision_tokens, strict=True)
        ]
        texts = self.tokenizer.encode([sample.placed.turns for sample in samples])
        ids, positions, targets, is_visual, encoders = [], [], [], [], []
        for number, (sample, text, encoder_rank) in enumerate(zip(samples, texts, job.encoder_rank, strict=True)):
            token_ids, is_target = expand_text(text, sample.placed.num_tokens, self.max_llm_tokens)
            if len(token_ids) != job.llm_tokens[number]:
                what = f"{len(token_ids)} tokens, {job.llm_tokens[number]} were profiled"
                raise UserError(_changed(job.samples[number], what))
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


def segments_of(job: SegmentsJob) -> TextBatch:
    """What a middle stage knows of its text: where each sample ends, and each token's place in its sample."""
    nothing = torch.zeros(0, dtype=torch.int64)
    positions = np.concatenate([np.arange(length) for length in job.llm_tokens])
    return TextBatch(
        token_ids=nothing,
        position_ids=torch.from_numpy(positions),
        segment_ends=list(itertools.accumulate(job.llm_tokens)),
        visual_positions=(),
        target_positions=nothing,
        target_ids=nothing,
    )


def _changed(ref: SampleRef, what: str) -> str:
    return (
        f"record {ref.row} of source `{ref.source}` has changed since it was profiled ({what}); "
        "delete results/<run>/shapes and run the workflow again"
    )
