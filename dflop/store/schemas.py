"""The columns of tables that several folders write or read, and the closed lists of values that some columns take."""

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

# One row a record of a shard. `row` counts inside the shard, so that a shard's file stays valid when records are
# inserted before it. `reason` and `detail` are null unless the record is rejected. `sum_sq_items` is 0 where all items
# are of one size. Each list holds one number a medium, in the record's order, so that training lays out the record's
# text without opening a medium:
# - `media_width`, `media_height`: pixels of a picture, or of a clip's frames;
# - `media_frames`: how many frames are taken of a clip; `media_frame_us`: microseconds between two of them (0 for a
#   picture);
# - `media_samples`: a sound's samples at 16 kHz; `media_rate_uhz`: a clip's own frame rate in microhertz.
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

# One row a repeat: `kind` is host, p2p, exchange or gradient_sync, `scope` intra (one node) or inter (several). A row
# of the kind communicator has the bytes of a GPU that one takes, and the seconds to make it.
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

# How long training takes to load samples: one row for each module and each modality that it reads. The data has
# `num_samples` of the modality; `num_measured` of them were loaded, of which `num_unreadable` had damaged media.
# `seconds` and `core_s` (CPU seconds of all threads) are means over samples, as is `media_bytes`, the size of a
# sample's files. `num_cores` is the number of cores of the measuring machine.
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

# One row a shape bin of a module and pass. A bin holds microbatches with a load (items of encoders, tokens of the LLM)
# from `least_load` to below twice that, and a mean segment from `least_segment` to below twice that. `ratio` is the
# measured time over that of the cost table; `factor` is the correction that schedules use.
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

# One row a step and rank: the step's time by what the rank did in it (`training.step_seconds`). The other columns in
# seconds add up to `step_s`.
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
