"""The training dataset: for each pipeline stage and microbatch, the media it encodes or the packed text it learns.

Indices move, pixels do not. An encoder's first stage opens the media of the samples that the schedule gives it; its
last stage and the LLM's first and last read records; the stages between read nothing. How many tokens a medium takes
in the text follows from its profiled size, so no header is read again. Only with `data.watch_media` does the stage that
decodes a medium first compare its header with the profile. A `MicrobatchLoader` is a torch dataset whose items are
microbatches, so that torch's DataLoader prefetches them in worker processes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from dflop.base import UserError
from dflop.config import DataConfig
from dflop.loading.decoding import MediaDecoder
from dflop.loading.shared_samples import SampleGroup, row_runs, shared_features, shared_keys
from dflop.models import SOUND_RATE_HZ, ModelSpec, load_runtime
from dflop.models.microbatch import EncoderBatch, MediaProcessor, MediumLayout, Movable, SegmentEnds, TextBatch
from dflop.shapes.manifests import Source, SourceRecords
from dflop.shapes.reader import MediumShape, MediumSize, PlacedText, ShapeReader, expand_text, place_positions
from dflop.shapes.record_media import Medium, RecordError
from dflop.shapes.records import Record, parse_record
from dflop.shapes.shares import pieces_of
from dflop.shapes.text import ChatTokenizer

__all__ = [
    "EncoderFeed",
    "LoadedMedia",
    "MicrobatchJob",
    "MicrobatchLoader",
    "SampleRef",
    "TrainingRecords",
    "microbatch_loader",
    "segments_of",
]


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where a sample's record lies."""

    source: str
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchJob:
    """One microbatch of one stage. Each field has one entry a sample, in the microbatch's order.

    `media` holds the profiled sizes of a sample's media, and `llm_tokens` all its tokens in the LLM. `kept_tokens` (how
    many of its media tokens the sample keeps after truncation) and `encoder_rank` (which replica encodes its media)
    have one number per encoder.

    A row may be a share of a sample: `shares` then has (share, degree), and `kept_tokens` are those of the share's own
    media, of the `whole_kept` of all encoders. `shares` is empty where no sample of the microbatch is shared. For the
    LLM, `group` says how the replica's neighbours share samples of this microbatch with it; None if they share none.
    """

    samples: tuple[SampleRef, ...]
    media: tuple[tuple[MediumSize, ...], ...]
    kept_tokens: tuple[tuple[int, ...], ...]
    llm_tokens: tuple[int, ...]
    encoder_rank: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[int, int], ...] = ()
    whole_kept: tuple[int, ...] = ()
    group: SampleGroup | None = None

    def all_kept(self) -> list[int]:
        """How many of its media tokens each whole sample keeps."""
        return list(self.whole_kept) or [sum(kept) for kept in self.kept_tokens]


@dataclass(frozen=True, slots=True)
class EncoderFeed:
    """What the loaders know of an encoder: the kinds of media that it takes, and its number of replicas."""

    kinds: tuple[str, ...]
    num_replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedMedia(Movable):
    """A microbatch of media. `unreadable` has a sentence for each medium that is not what was profiled; `undecodable`
    has the positions in the job of the samples with media that could not be decoded."""

    batch: EncoderBatch
    unreadable: tuple[str, ...] = ()
    undecodable: tuple[int, ...] = ()


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
    shapes: list[MediumShape]
    placed: PlacedText


@dataclass
class MicrobatchLoader(Dataset):
    """`loader[job]` is a `LoadedMedia` for a stage of encoder number `encoder`, and a `TextBatch` for a stage of the
    LLM (`encoder` is None). Media are decoded only with a `processor`, which an encoder's first stage has. `lay_out`
    makes the batches' `layout` from their media, for encoders that have one."""

    records: TrainingRecords
    reader: ShapeReader
    tokenizer_folder: Path
    max_llm_tokens: int
    encoders: tuple[EncoderFeed, ...]
    encoder: int | None
    processor: MediaProcessor | None = None
    lay_out: Callable[[Sequence[MediumLayout]], Movable] | None = None

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self.tokenizer_folder, self.reader.rules)

    def __getitem__(self, job: MicrobatchJob) -> LoadedMedia | TextBatch:
        """Load a microbatch.

        Raises:
            UserError: naming the sample whose record or media have changed since they were profiled.
        """
        return self._text(job) if self.encoder is None else self._media(job, self.encoder)

    def _profiled(self, ref: SampleRef, sizes: Sequence[MediumSize], kept_tokens: int) -> _Sample:
        """A sample with its media placed in its text. They must have as many tokens as the schedule counts on."""
        try:
            record, media_root = self.records.record(ref)
            shapes = self.reader.stored_media(record, sizes)
            placed = self.reader.place_media(record, shapes)
        except (RecordError, IndexError) as error:
            raise UserError(_changed(ref, str(error))) from None
        whole = sum(placed.num_tokens)
        if whole < kept_tokens or (whole > kept_tokens and not self._is_truncated(placed)):
            raise UserError(_changed(ref, f"{whole} tokens of media, {kept_tokens} were profiled"))
        return _Sample(record, media_root, shapes, placed)

    def _is_truncated(self, placed: PlacedText) -> bool:
        (text,) = self.tokenizer.encode([placed.turns])
        return len(text.token_ids) - len(placed.num_tokens) + sum(placed.num_tokens) > self.max_llm_tokens

    def _media(self, job: MicrobatchJob, encoder: int) -> LoadedMedia:
        kinds = self.encoders[encoder].kinds
        items: list[np.ndarray] = []
        layouts: list[tuple[MediumLayout, ...]] = []
        unreadable: list[str] = []
        undecodable: list[int] = []
        for place, (ref, sizes, kept) in enumerate(zip(job.samples, job.media, job.all_kept(), strict=True)):
            sample = self._profiled(ref, sizes, kept)
            share, degree = job.shares[place] if job.shares else (0, 1)
            pieces = pieces_of(sample.shapes, kinds, degree)[share]
            layouts.append(
                tuple(
                    MediumLayout(
                        kind=shape.kind,
                        num_items=shape.count.num_items,
                        height=shape.size.height,
                        width=shape.size.width,
                        grid=shape.count.grid,
                        frame_s=shape.frame_us / 1e6,
                    )
                    for shape in (piece.of(sample.shapes[piece.medium]) for piece in pieces)
                )
            )
            if self.processor is None:
                continue
            if self.reader.data.watch_media:
                self._check_unchanged(ref, sample)
            blank: list[Medium] = []
            limits = self.reader.limits.for_a_record()
            decoder = MediaDecoder(self.processor, self.reader.data.video, limits, unreadable, blank)
            try:
                decoded = decoder.items_of(
                    [sample.record.media[piece.medium] for piece in pieces],
                    [sizes[piece.medium] for piece in pieces],
                    sample.media_root,
                    [medium.num_items for medium in layouts[-1]],
                    [piece.frames(sample.shapes[piece.medium]) for piece in pieces],
                )
            except RecordError as error:
                raise UserError(_changed(ref, str(error))) from None
            assert [len(part) for part in decoded] == [medium.num_items for medium in layouts[-1]]
            items += decoded
            if blank:
                undecodable.append(place)
        media = list(itertools.chain.from_iterable(layouts))
        return LoadedMedia(
            batch=EncoderBatch(
                items=None if self.processor is None else _stacked(items, self.processor),
                pixel_values=self.processor and self.processor.pixel_values,
                media=tuple(layouts),
                kept_tokens=tuple(kept[encoder] for kept in job.kept_tokens),
                layout=self.lay_out(media) if self.lay_out and media else None,
            ),
            unreadable=tuple(unreadable),
            undecodable=tuple(undecodable),
        )

    def _check_unchanged(self, ref: SampleRef, sample: _Sample) -> None:
        """Read the headers of a sample's media again, and raise a UserError if one has changed since profiling."""
        try:
            found = self.reader.read_media(sample.record, sample.media_root)
        except RecordError as error:
            raise UserError(_changed(ref, str(error))) from None
        for medium, now, profiled in zip(sample.record.media, found, sample.shapes, strict=True):
            if now._replace(seconds=profiled.seconds, rate_hz=profiled.rate_hz) != profiled:
                change = f"{medium.file} has {_said(now)}, it was profiled with {_said(profiled)}"
                raise UserError(_changed(ref, change))

    def _text(self, job: MicrobatchJob) -> TextBatch:
        samples = [
            self._profiled(ref, sizes, kept)
            for ref, sizes, kept in zip(job.samples, job.media, job.all_kept(), strict=True)
        ]
        texts = self.tokenizer.encode([sample.placed.turns for sample in samples])
        runs = row_runs(job.llm_tokens, job.group)
        ids, targets, positions = [], [], []
        for number, (sample, text) in enumerate(zip(samples, texts, strict=True)):
            token_ids, is_target = expand_text(text, sample.placed.num_tokens, self.max_llm_tokens)
            if len(token_ids) != job.llm_tokens[number]:
                change = f"{len(token_ids)} tokens, {job.llm_tokens[number]} were profiled"
                raise UserError(_changed(job.samples[number], change))
            ids.append(token_ids)
            targets.append(is_target)
            if self.reader.rules.num_position_axes > 1:
                positions.append(place_positions(text, sample.placed, self.reader.rules, self.max_llm_tokens))
        # The token at position i is predicted from position i - 1, which another replica may have. A sample's first
        # token is never a target.
        next_ids, is_learned = ([np.append(own[1:], own[0] * 0) for own in each] for each in (ids, targets))
        position_ids, segment_ends = segments_of(job.llm_tokens, job.group)
        learned = np.flatnonzero(_in_runs(is_learned, runs))
        token_ids, next_ids = _in_runs(ids, runs), _in_runs(next_ids, runs)
        shared = None
        if job.group:
            slots = [self._slots(own) for own in ids]
            shared = shared_features(runs, slots, job.kept_tokens, job.encoder_rank, job.group)
        return TextBatch(
            token_ids=torch.from_numpy(token_ids),
            position_ids=torch.from_numpy(_in_runs(positions, runs)) if positions else position_ids,
            segment_ends=segment_ends,
            feature_positions=() if shared else self._feature_positions(job, token_ids),
            target_positions=torch.from_numpy(learned),
            target_ids=torch.from_numpy(next_ids[learned]),
            shared_features=shared,
        )

    def _slots(self, token_ids: np.ndarray) -> list[np.ndarray]:
        """The positions of media tokens, by encoder."""
        ids = self.tokenizer.placeholder_ids
        return [np.flatnonzero(np.isin(token_ids, [ids[kind] for kind in own.kinds])) for own in self.encoders]

    def _feature_positions(self, job: MicrobatchJob, token_ids: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Where features go in the packed text: for each replica of each encoder, int64 [num_features]."""
        positions = []
        for place, (encoder, slots) in enumerate(zip(self.encoders, self._slots(token_ids), strict=True)):
            replica = np.repeat([ranks[place] for ranks in job.encoder_rank], job.llm_tokens)[slots]
            positions += [torch.from_numpy(slots[replica == number]) for number in range(encoder.num_replicas)]
        return tuple(positions)


def microbatch_loader(
    data: DataConfig,
    spec: ModelSpec,
    records: TrainingRecords,
    *,
    tokenizer_folder: Path,
    module: str,
    num_replicas: Sequence[int],
    processor: MediaProcessor | None,
) -> MicrobatchLoader:
    """The loader of a module's microbatches; `num_replicas` has one number for each encoder."""
    encoders = [encoder.name for encoder in spec.encoders]
    lay_out = load_runtime(spec.family).layouts.get(module)
    return MicrobatchLoader(
        records=records,
        reader=ShapeReader(spec.rules, data),
        tokenizer_folder=tokenizer_folder,
        max_llm_tokens=data.max_llm_tokens,
        encoders=tuple(EncoderFeed(encoder.media, dp) for encoder, dp in zip(spec.encoders, num_replicas, strict=True)),
        encoder=None if module == "llm" else encoders.index(module),
        processor=processor,
        lay_out=partial(lay_out, spec) if lay_out else None,
    )


def segments_of(llm_tokens: Sequence[int], group: SampleGroup | None = None) -> tuple[torch.Tensor, SegmentEnds]:
    """For samples of `llm_tokens` tokens, packed in a row: each token's position in its sample, int64 [num_tokens], and
    where each sample ends. Of samples that the `group` shares, the replica has its shares."""
    runs = row_runs(llm_tokens, group)
    positions = np.concatenate([np.arange(own.start, own.stop) for of_row in runs for own in of_row])
    ends = list(itertools.accumulate(sum(map(len, own)) for own in runs))
    return torch.from_numpy(positions), SegmentEnds(ends, keys=shared_keys(runs, group) if group else None)


def _in_runs(of_samples: Sequence[np.ndarray], runs: Sequence[Sequence[range]]) -> np.ndarray:
    """What stands in these runs of samples' values [..., num_tokens], one after the other."""
    parts = zip(of_samples, runs, strict=True)
    return np.concatenate(
        [np.asarray(values)[..., own.start : own.stop] for values, of_row in parts for own in of_row], axis=-1
    )


def _stacked(items: list[np.ndarray], processor: MediaProcessor) -> torch.Tensor:
    dtype = np.uint8 if processor.pixel_values else np.float32
    stacked = np.concatenate([np.empty((0, *processor.item_shape), dtype), *items])
    return torch.from_numpy(np.ascontiguousarray(stacked))  # a processor may leave axes in another order


def _said(shape: MediumShape) -> str:
    if shape.kind == "audio":
        return f"{shape.num_samples / SOUND_RATE_HZ:.6g} s of sound"
    pixels = f"{shape.size.width}x{shape.size.height} pixels"
    if shape.kind != "video":
        return pixels
    return f"{shape.num_frames} frames of {pixels}, {shape.frame_us / 1e6:.6g} s apart"


def _changed(ref: SampleRef, change: str) -> str:
    return (
        f"record {ref.row} of source `{ref.source}` has changed since it was profiled ({change}); "
        "restore it to go on, or delete results/<run>/shapes and run the workflow again: a new run begins at step 1"
    )
