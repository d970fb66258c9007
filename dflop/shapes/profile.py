"""Shape profiling: from the records of one shard to one row each, without decoding any medium.

A record that cannot be used becomes a row with a reason; it does not stop the shard. The records of a shard are divided
among worker processes.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dflop.base import UserError
from dflop.shapes.manifests import Shard, Source, SourceRecords
from dflop.shapes.reader import MediumShape, PlacedText, ShapeReader, expand_text
from dflop.shapes.record_media import Medium, RecordError
from dflop.shapes.records import Record, parse_record, record_id
from dflop.shapes.samples import MEDIA_COLUMNS
from dflop.shapes.text import ChatTokenizer
from dflop.shapes.token_counts import TextCounts
from dflop.store import SHARD_SCHEMA

__all__ = ["ShapeProfiler", "profile_shard"]

# Records that a process takes at once and tokenises together; fewer if their texts have more characters than this.
_BATCH = 512
_BATCH_CHARACTERS = 4 << 20
_LEAST_RECORDS_PER_WORKER = 2_000


@dataclass(frozen=True, kw_only=True)
class ShapeProfiler:
    """Turns records into rows, and holds everything else that a row depends on. Records with media of the kinds
    `refused_media`, which the model does not encode, are rejected."""

    source: Source
    reader: ShapeReader
    tokenizer: ChatTokenizer
    max_llm_tokens: int
    refused_media: tuple[str, ...] = ()

    def profile(self, raw_records: Iterable[Any | RecordError], first_row: int = 0) -> pl.DataFrame:
        """Shapes of all records, in order, as a frame with the columns of `store.SHARD_SCHEMA`."""
        rows: list[dict[str, Any]] = []
        for batch in _batches(map(self._read, raw_records)):
            counts = iter(_count([record.placed.turns for record in batch if record.is_placed], self.tokenizer))
            for sample_id, columns, placed in batch:
                row = {"row": first_row + len(rows), "sample_id": sample_id}
                outcome = placed if isinstance(placed, RecordError) else next(counts)
                if isinstance(outcome, TextCounts):
                    outcome = self._token_columns(placed, outcome)
                if isinstance(outcome, RecordError):
                    row |= {"reason": outcome.reason, "detail": outcome.detail}
                else:
                    row |= columns | outcome
                rows.append(row)
        return _frame(rows)

    def _read(self, raw: Any | RecordError) -> "_ReadRecord":
        sample_id = record_id(raw)
        try:
            record = parse_record(raw, trust_sizes=self.source.trust_sizes)
            for kind in sorted({medium.kind for medium in record.media} & set(self.refused_media)):
                raise RecordError("no_encoder", f"the model has no encoder for {kind} (`data.without_encoder: reject`)")
            shapes = self.reader.read_media(record, self.source.media_root)
            return _ReadRecord(sample_id, _media_columns(record, shapes), self.reader.place_media(record, shapes))
        except RecordError as error:
            # A copy, because the error's traceback would keep the media in memory.
            return _ReadRecord(sample_id, {}, RecordError(error.reason, error.detail))

    def _token_columns(self, placed: PlacedText, counts: TextCounts) -> dict[str, Any] | RecordError:
        if counts.num_placeholders != len(placed.num_tokens):
            detail = "the tokenizer's chat template drops or repeats media placeholders of this record"
            return RecordError("placeholder_mismatch", detail)
        audio_tokens = sum(
            tokens for tokens, medium in zip(placed.num_tokens, placed.media, strict=True) if medium.kind == "audio"
        )
        media_tokens = sum(placed.num_tokens)
        text_tokens = counts.num_tokens - len(placed.num_tokens)
        whole, most = text_tokens + media_tokens, self.max_llm_tokens
        kept_vision_tokens, kept_audio_tokens = media_tokens - audio_tokens, audio_tokens
        target_tokens = counts.num_targets
        if whole > most:
            (text,) = self.tokenizer.encode([placed.turns])
            token_ids, is_target = expand_text(text, placed.num_tokens, most)
            target_tokens = int(is_target.sum())
            kept_vision_tokens = self._num_placeholders(token_ids, "image", "video")
            kept_audio_tokens = self._num_placeholders(token_ids, "audio")
        if not target_tokens:
            if whole > most:
                detail = f"{whole} tokens, and the first {most} (data.max_llm_tokens) hold nothing to learn"
                return RecordError("too_long", detail)
            return RecordError("empty", "no token of the assistant is left to learn once the text is tokenised")
        return {
            "vision_tokens": media_tokens - audio_tokens,
            "kept_vision_tokens": kept_vision_tokens,
            "audio_tokens": audio_tokens,
            "kept_audio_tokens": kept_audio_tokens,
            "text_tokens": text_tokens,
            "target_tokens": target_tokens,
            "llm_tokens": min(whole, most),
            "truncated": whole > most,
        }

    def _num_placeholders(self, token_ids: np.ndarray, *kinds: str) -> int:
        return int(np.isin(token_ids, [self.tokenizer.placeholder_ids[kind] for kind in kinds]).sum())


class _ReadRecord(NamedTuple):
    """A record that is read but not yet tokenised: the columns that describe its media, and its text with the media
    placed, or why it cannot be used."""

    sample_id: str | None
    media_columns: dict[str, Any]
    placed: PlacedText | RecordError

    @property
    def is_placed(self) -> bool:
        return isinstance(self.placed, PlacedText)


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What a process needs to make its own profiler and to open the records."""

    source: Source
    shard: Shard
    seed: int
    reader: ShapeReader
    tokenizer_folder: Path | None
    max_llm_tokens: int
    refused_media: tuple[str, ...]

    def open(self) -> tuple[ShapeProfiler, SourceRecords]:
        profiler = ShapeProfiler(
            source=self.source,
            reader=self.reader.remembering(),
            tokenizer=ChatTokenizer(self.tokenizer_folder, self.reader.rules),
            max_llm_tokens=self.max_llm_tokens,
            refused_media=self.refused_media,
        )
        return profiler, SourceRecords(self.source, self.seed)


def profile_shard(
    source: Source,
    shard: Shard,
    *,
    seed: int,
    reader: ShapeReader,
    tokenizer_folder: Path | None,
    max_llm_tokens: int,
    num_workers: int,
    refused_media: tuple[str, ...] = (),
    progress: Callable[[int], None] = lambda count: None,
) -> pl.DataFrame:
    """Shapes of a shard's records, in order, as a frame with the columns of `store.SHARD_SCHEMA`.

    Records with media of the kinds `refused_media`, which the model does not encode, are rejected. `progress` is called
    with the number of records done since its last call.

    Raises:
        UserError: when the tokenizer or the manifest cannot be used, or a process dies.
    """
    recipe = _Recipe(
        source=source,
        shard=shard,
        seed=seed,
        reader=reader,
        tokenizer_folder=tokenizer_folder,
        max_llm_tokens=max_llm_tokens,
        refused_media=refused_media,
    )
    starts = range(0, shard.num_records, _BATCH)
    num_workers = min(num_workers, useful_workers(shard.num_records))
    if num_workers < 2:
        frames = _collect(map(_Part(recipe).profile, starts), progress)
    else:
        # Tokenising is spread over the processes already.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        pool = ProcessPoolExecutor(
            num_workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(recipe,)
        )
        with pool:
            try:
                frames = _collect(pool.map(_profile_part, starts), progress)
            except BrokenProcessPool:
                raise UserError(
                    f"a process that profiled {shard.name} died, most often for want of memory; use fewer `--workers`"
                ) from None
    return pl.concat([pl.DataFrame(schema=SHARD_SCHEMA), *frames])


def useful_workers(num_records: int) -> int:
    """How many processes can share a shard before they cost more time to start than they save."""
    return max(1, num_records // _LEAST_RECORDS_PER_WORKER)


class _Part:
    """A profiler with its records open: one a process."""

    def __init__(self, recipe: _Recipe) -> None:
        self._shard = recipe.shard
        self._profiler, self._records = recipe.open()

    def profile(self, start: int) -> pl.DataFrame:
        """Shapes of the shard's records `[start, start + _BATCH)`."""
        with _garbage_left():
            return self._profiler.profile(self._records.read_shard(self._shard, start, start + _BATCH), first_row=start)


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Switch the garbage collector off for a batch: it would find few cycles and take a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_part: _Part | None = None


def _start_worker(recipe: _Recipe) -> None:
    global _part
    _part = _Part(recipe)


def _profile_part(start: int) -> pl.DataFrame:
    return _part.profile(start)


def _collect(frames: Iterable[pl.DataFrame], progress: Callable[[int], None]) -> list[pl.DataFrame]:
    collected = []
    for frame in frames:
        collected.append(frame)
        progress(len(frame))
    return collected


def _batches(records: Iterable[_ReadRecord]) -> Iterator[list[_ReadRecord]]:
    batch, num_characters = [], 0
    for record in records:
        batch.append(record)
        if record.is_placed:
            num_characters += sum(len(turn.content) for turn in record.placed.turns)
        if len(batch) == _BATCH or num_characters > _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _count(conversations: Sequence[Sequence[Any]], tokenizer: ChatTokenizer) -> list[TextCounts | RecordError]:
    """Tokens of each conversation, or why it cannot be used. If a batch fails, its conversations are counted singly."""
    try:
        return list(tokenizer.count(conversations))
    except RecordError as error:
        if len(conversations) == 1:
            return [error]
    return [counts for turns in conversations for counts in _count([turns], tokenizer)]


def _frame(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Rows as a frame. The list columns are grouped from long columns with one value a medium: building a polars list
    for each row would double the time of profiling."""
    columns = {name: [row.get(name) for row in rows] for name in SHARD_SCHEMA}
    media = {name: columns.pop(name) for name in MEDIA_COLUMNS}
    counts = [len(of_row or ()) for of_row in media[MEDIA_COLUMNS[0]]]
    flat = {name: [value for of_row in lists if of_row for value in of_row] for name, lists in media.items()}
    long_frame = pl.DataFrame(
        {"row": np.repeat(np.array(columns["row"], np.int64), counts), **flat},
        schema={"row": pl.Int64, **dict.fromkeys(flat, pl.Int32)},
    )
    frame = pl.DataFrame(columns, schema={name: SHARD_SCHEMA[name] for name in columns})
    lists = long_frame.group_by("row", maintain_order=True).agg(pl.all())
    is_used = pl.col("reason").is_null()
    return (
        frame.join(lists, on="row", how="left", maintain_order="left")
        .with_columns(pl.when(is_used).then(pl.col(MEDIA_COLUMNS).fill_null([])))
        .select(SHARD_SCHEMA.names())
    )


def _media_columns(record: Record, shapes: Sequence[MediumShape]) -> dict[str, Any]:
    return {
        "modality": _modality(record.media),
        "num_images": sum(shape.kind == "image" for shape in shapes),
        "num_frames": sum(shape.num_frames for shape in shapes),
        "audio_s": sum(shape.seconds for shape in shapes),
        "audio_rate_hz": max((shape.rate_hz for shape in shapes if shape.kind == "audio"), default=None),
        "num_audio_windows": sum(shape.count.num_items for shape in shapes if shape.kind == "audio"),
        "num_items": sum(shape.count.num_items for shape in shapes if shape.kind != "audio"),
        "sum_sq_items": sum(shape.count.sum_sq_items for shape in shapes if shape.kind != "audio"),
        "media_width": [shape.size.width for shape in shapes],
        "media_height": [shape.size.height for shape in shapes],
        "media_frames": [shape.num_frames for shape in shapes],
        "media_frame_us": [shape.frame_us for shape in shapes],
        "media_samples": [shape.num_samples for shape in shapes],
        "media_rate_uhz": [shape.rate_uhz for shape in shapes],
    }


def _modality(media: Sequence[Medium]) -> str:
    kinds = {medium.kind for medium in media}
    if len(kinds) > 1:
        return "mixed"
    if not kinds:
        return "text"
    return "multi_image" if kinds == {"image"} and len(media) > 1 else kinds.pop()
