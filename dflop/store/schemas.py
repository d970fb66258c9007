"""The columns of tables that several folders write or read, and the closed lists of what stands in them."""

import polars as pl

__all__ = [
    "CORRECTIONS_SCHEMA",
    "LEFT_OUT_SCHEMA",
    "LINKS_SCHEMA",
    "LINK_MODEL_SCHEMA",
    "LOADING_SCHEMA",
    "MODALITIES",
    "REJECT_REASONS",
    "SHARD_SCHEMA",
    "STEP_SECONDS_SCHEMA",
]

MODALITIES = ("text", "image", "multi_image", "video", "audio", "mixed")

REJECT_REASONS = (
    "missing_media",
    "unreadable_media",
    "bad_record",
    "placeholder_mismatch",
    "no_encoder",
    "empty",
    "path_escape",
    "too_long",
    "duplicate_id",
)

# One row a record of a shard. `row` counts inside the shard, so that a shard's file stays valid when
# records are inserted before it; `reason` and `detail` are null unless the record is rejected. The lists hold a number
# a medium, in the record's order: width and height in pixels of a picture or of a clip's frames, how many frames are
# taken of a clip, the microseconds between two of them (0 of a picture), a sound's samples at 16 kHz, and the frames
# that a clip has in a million seconds. Training lays out its text by them, without opening a medium. `sum_sq_items` is
# 0 where all items are of one size.
SHARD_SCHEMA = pl.Schema(
    {
        "row": pl.Int64,
        "sample_id": pl.String,
        "modality": pl.String,
        "num_images": pl.Int32,
        "num_frames": pl.Int32,
        "audio_s": pl.Float64,
        "audio_rate_hz": pl.Int32,
        "num_audio_windows": pl.Int32,
        "num_items": pl.Int32,
        "sum_sq_items": pl.Float64,
        "vision_tokens": pl.Int32,
        "kept_vision_tokens": pl.Int32,
        "audio_tokens": pl.Int32,
        "kept_audio_tokens": pl.Int32,
        "text_tokens": pl.Int32,
        "target_tokens": pl.Int32,
        "llm_tokens": pl.Int32,
        "truncated": pl.Boolean,
        "media_width": pl.List(pl.Int32),
        "media_height": pl.List(pl.Int32),
        "media_frames": pl.List(pl.Int32),
        "media_frame_us": pl.List(pl.Int32),
        "media_samples": pl.List(pl.Int32),
        "media_rate_uhz": pl.List(pl.Int32),
        "reason": pl.String,
        "detail": pl.String,
    }
)

# One row a repeat: `kind` is p2p or gradient_sync, `scope` intra (one node) or inter (several).
LINKS_SCHEMA = pl.Schema(
    {
        "kind": pl.String,
        "scope": pl.String,
        "num_ranks": pl.Int64,
        "num_bytes": pl.Int64,
        "seconds": pl.Float64,
        "repeat": pl.Int64,
    }
)
LINK_MODEL_SCHEMA = pl.Schema(
    {
        "kind": pl.String,
        "scope": pl.String,
        "num_ranks": pl.Int64,
        "latency_s": pl.Float64,
        "bytes_per_s": pl.Float64,
        "num_points": pl.Int64,
        "median_error": pl.Float64,
    }
)

# What loading takes for training, one row for each modality of the data that a module reads. `num_samples` the data has
# of it and `num_measured` were loaded, of which `num_unreadable` had damaged media. `seconds` and `core_s` (of all
# threads) are those of a mean sample, `media_bytes` is the mean of its files. `num_cores` is the machine's.
LOADING_SCHEMA = pl.Schema(
    {
        "module": pl.String,
        "modality": pl.String,
        "num_samples": pl.Int64,
        "num_measured": pl.Int64,
        "num_unreadable": pl.Int64,
        "seconds": pl.Float64,
        "core_s": pl.Float64,
        "media_bytes": pl.Float64,
        "num_cores": pl.Int64,
    }
)

# Samples that a plan's devices cannot hold, one row each: the columns of `rejects`, and the figures behind `detail`.
LEFT_OUT_SCHEMA = pl.Schema(
    {
        "source": pl.String,
        "row": pl.Int64,
        "sample_id": pl.String,
        "reason": pl.String,
        "detail": pl.String,
        "llm_tokens": pl.Int64,
        "num_items": pl.Int64,
        "predicted_bytes": pl.Float64,
        "limit_bytes": pl.Float64,
    }
)

# One row a shape bin of a module and pass: loads (items of encoders, tokens of the LLM) and mean segments
# from the least to below twice the least. `ratio` is measured over the cost table's time, `factor` what schedules use.
CORRECTIONS_SCHEMA = pl.Schema(
    {
        "module": pl.String,
        "pass": pl.String,
        "least_load": pl.Int64,
        "least_segment": pl.Int64,
        "num_observations": pl.Int64,
        "num_steps": pl.Int64,
        "ratio": pl.Float64,
        "factor": pl.Float64,
    }
)

# One row a step and rank: where the rank's seconds of the step went (`training.step_seconds`); they add up to `step_s`.
STEP_SECONDS_SCHEMA = pl.Schema(
    {
        "step": pl.Int64,
        "rank": pl.Int64,
        "computing_s": pl.Float64,
        "bubble_s": pl.Float64,
        "data_s": pl.Float64,
        "peers_s": pl.Float64,
        "schedule_s": pl.Float64,
        "sync_s": pl.Float64,
        "optimiser_s": pl.Float64,
        "other_s": pl.Float64,
        "step_s": pl.Float64,
        "warmup": pl.Boolean,
    }
)
