"""Shape profiling: from the records of one shard to one row each, without decoding any medium.

A record that cannot be used becomes a row with a reason; nothing stops the shard.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflop.config import VideoConfig
from dflop.data.media import audio_seconds, frame_indices, image_size, video_header
from dflop.data.records import Medium, Record, RecordError, parse_record, record_id, resolve_medium
from dflop.data.text import ChatTokenizer, TokenizedText
from dflop.models import ItemCount, ShapeRules
from dflop.store import SHARD_SCHEMA

__all__ = ["expand_text", "profile_records"]

_BATCH = 512


def profile_records(
    raw_records: Sequence[Any],
    *,
    media_root: Path,
    rules: ShapeRules,
    tokenizer: ChatTokenizer,
    video: VideoConfig,
    max_llm_tokens: int,
    progress: Callable[[int], None] = lambda count: None,
) -> pl.DataFrame:
    """Shapes of all records, in order, as a frame with the columns of `store.SHARD_SCHEMA`."""
    rows: list[dict[str, Any]] = []
    for start in range(0, len(raw_records), _BATCH):
        batch = raw_records[start : start + _BATCH]
        outcomes = [_read(raw, media_root, rules, video) for raw in batch]
        texts = iter(_encode([record for record, shape, _ in outcomes if isinstance(shape, dict)], tokenizer))
        for offset, (record, shape, counts) in enumerate(outcomes):
            row = {"row": start + offset, "sample_id": record_id(batch[offset])}
            if isinstance(shape, RecordError):
                row |= {"reason": shape.reason, "detail": shape.detail}
            elif isinstance(text := next(texts), RecordError):
                row |= {"reason": text.reason, "detail": text.detail}
            else:
                row |= shape | _token_columns(record, counts, text, max_llm_tokens)
            rows.append(row)
        progress(len(batch))
    return pl.DataFrame(rows, schema=SHARD_SCHEMA, orient="row")


def expand_text(text: TokenizedText, num_tokens: Iterable[int], max_llm_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Put media into a text: each placeholder becomes as many copies of itself as its medium has tokens.

    Returns the token ids and the target mask, both cut after `max_llm_tokens`.
    """
    repeats = np.ones(len(text.token_ids), dtype=np.int64)
    repeats[text.placeholders] = list(num_tokens)
    token_ids = np.repeat(text.token_ids, repeats)[:max_llm_tokens]
    return token_ids, np.repeat(text.is_target, repeats)[:max_llm_tokens]


def _read(raw: Any, media_root: Path, rules: ShapeRules, video: VideoConfig):
    """(record, its media columns, items and tokens per medium), or (record or None, the error, [])."""
    record = None
    try:
        record = parse_record(raw)
        return record, *_media_columns(record, media_root, rules, video)
    except RecordError as error:
        return record, error, []


def _encode(records: Sequence[Record], tokenizer: ChatTokenizer) -> list[TokenizedText | RecordError]:
    """Tokens of each record, or why its text cannot be used; one by one where a batch holds such a record."""
    try:
        return list(tokenizer.encode([record.turns for record in records]))
    except RecordError as error:
        if len(records) == 1:
            return [error]
    return [text for record in records for text in _encode([record], tokenizer)]


def _media_columns(
    record: Record, media_root: Path, rules: ShapeRules, video: VideoConfig
) -> tuple[dict[str, Any], list[ItemCount]]:
    num_images = sum(medium.kind == "image" for medium in record.media)
    num_frames, audio_s, counts = 0, 0.0, []
    for medium in record.media:
        path = resolve_medium(media_root, medium)
        if medium.kind == "image":
            counts.append(rules.image(*image_size(path), num_images))
        elif medium.kind == "video":
            taken = len(frame_indices(video_header(path), video))
            num_frames += taken
            counts.append(rules.video(taken))
        else:
            seconds = audio_seconds(path)
            audio_s += seconds
            counts.append(rules.audio(seconds))
    columns = {
        "modality": _modality(record.media),
        "num_images": num_images,
        "num_frames": num_frames,
        "audio_s": audio_s,
        "num_items": sum(
            count.num_items for count, medium in zip(counts, record.media, strict=True) if medium.kind != "audio"
        ),
    }
    return columns, counts


def _modality(media: Sequence[Medium]) -> str:
    kinds = {medium.kind for medium in media}
    if len(kinds) > 1:
        return "mixed"
    if not kinds:
        return "text"
    return "multi_image" if kinds == {"image"} and len(media) > 1 else kinds.pop()


def _token_columns(record: Record, counts: list[ItemCount], text: TokenizedText, max_llm_tokens: int) -> dict[str, Any]:
    if len(text.placeholders) != len(counts):
        detail = "the tokenizer's chat template drops or repeats media placeholders of this record"
        return {"reason": "placeholder_mismatch", "detail": detail}
    num_tokens = [count.num_tokens for count in counts]
    is_audio = [medium.kind == "audio" for medium in record.media]
    audio_tokens = sum(tokens for tokens, audio in zip(num_tokens, is_audio, strict=True) if audio)
    vision_tokens = sum(num_tokens) - audio_tokens
    text_tokens = len(text.token_ids) - len(counts)
    whole = text_tokens + sum(num_tokens)
    kept_vision_tokens, target_tokens = vision_tokens, int(text.is_target.sum())
    if whole > max_llm_tokens:
        token_ids, is_target = expand_text(text, num_tokens, max_llm_tokens)
        target_tokens = int(is_target.sum())
        if not target_tokens:
            detail = f"{whole} tokens, and the first {max_llm_tokens} (data.max_llm_tokens) hold nothing to learn"
            return {"reason": "too_long", "detail": detail}
        visual = [text.token_ids[at] for at, audio in zip(text.placeholders, is_audio, strict=True) if not audio]
        kept_vision_tokens = int(np.isin(token_ids, visual).sum())
    return {
        "vision_tokens": vision_tokens,
        "kept_vision_tokens": kept_vision_tokens,
        "audio_tokens": audio_tokens,
        "text_tokens": text_tokens,
        "target_tokens": target_tokens,
        "llm_tokens": min(whole, max_llm_tokens),
        "truncated": whole > max_llm_tokens,
    }
