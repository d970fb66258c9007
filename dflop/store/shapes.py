"""`shapes.duckdb`: the samples and rejects of all shards in one database. No two samples have the same id."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dflop.base import UserError
from dflop.store.database import write_database
from dflop.store.parquet import read_parquet
from dflop.store.schemas import SHARD_SCHEMA

__all__ = ["HeldOut", "ShardFile", "write_shapes"]

_SHAPES_SQL = """
CREATE TABLE sources AS
    SELECT name, path, media_root, sampling, digest, num_records, epochs, weight FROM source_frame ORDER BY position;

CREATE TABLE records AS
    SELECT shard.position AS shard_position, shape.row AS shard_row, shard.source, shard.source_position,
           coalesce(sampled.row, shard.first_row + shape.row) AS manifest_row, shard.name AS shard,
           shape.* EXCLUDE (row, filename, sample_id),
           coalesce(shape.sample_id, shard.source || '/' || manifest_row) AS given_id,
           shape.sample_id IS NULL AS is_unnamed
    FROM read_parquet($files, filename = true) AS shape
    JOIN shard_frame AS shard ON shape.filename = shard.path
    LEFT JOIN sampled_frame AS sampled
        ON sampled.source = shard.source AND sampled.position = shard.start + shape.row;

CREATE TABLE accepted AS
    SELECT *, min(source_position) OVER (PARTITION BY given_id) AS first_source,
           row_number() OVER (PARTITION BY source, is_unnamed, given_id
                              ORDER BY shard_position, shard_row) AS occurrence
    FROM records WHERE reason IS NULL;

CREATE TABLE named AS
    SELECT * REPLACE (CASE WHEN first_source < source_position THEN source || '/' || given_id ELSE given_id END
                      AS given_id)
    FROM accepted WHERE occurrence = 1 OR $keep_duplicates;

-- The mark before a number: one `#` more than any id has in a row, so that no numbered id equals another record's id.
CREATE TABLE numbering AS
    SELECT repeat('#', 1 + coalesce(max(len(run)), 0)) AS mark
    FROM (SELECT unnest(regexp_extract_all(given_id, '#+')) AS run FROM named WHERE contains(given_id, '#'));

CREATE TABLE samples AS
    SELECT CASE WHEN number > 1 THEN given_id || (SELECT mark FROM numbering) || number ELSE given_id END AS sample_id,
           source, manifest_row AS row, shard, modality, num_images, num_frames, audio_s, num_items, vision_tokens,
           audio_tokens, text_tokens, llm_tokens, truncated, kept_vision_tokens, kept_audio_tokens, target_tokens,
           num_audio_windows, audio_rate_hz, media_width, media_height, media_frames, media_frame_us, media_samples,
           media_rate_uhz, sum_sq_items,
           -- Samples are held out in the order of their ids' hashes: when a record comes or goes, few others change.
           of_evaluation
               OR row_number() OVER (PARTITION BY of_evaluation ORDER BY md5($seed || '/' || given_id), number)
                  <= ceil($evaluation_share * count(*) OVER (PARTITION BY of_evaluation)) AS evaluation
    FROM (SELECT *, list_contains($evaluation_sources::VARCHAR[], source) AS of_evaluation,
                 row_number() OVER (PARTITION BY given_id ORDER BY is_unnamed, shard_position, shard_row) AS number
          FROM named)
    ORDER BY shard_position, shard_row;

CREATE TABLE rejects AS
    SELECT source, row, sample_id, reason, detail FROM (
        SELECT source, manifest_row AS row, given_id AS sample_id, reason, detail, shard_position, shard_row
        FROM records WHERE reason IS NOT NULL
        UNION ALL
        SELECT source, manifest_row, given_id, 'duplicate_id',
               'an earlier record of the source has the same id (`data.duplicate_ids: keep` keeps both)',
               shard_position, shard_row
        FROM accepted WHERE occurrence > 1 AND NOT $keep_duplicates)
    ORDER BY shard_position, shard_row;

DROP TABLE numbering;
DROP TABLE named;
DROP TABLE accepted;
DROP TABLE records;

CREATE VIEW reject_summary AS
    SELECT source, reason, count(*) AS num_records,
           list(sample_id || ': ' || detail ORDER BY row)[1:3] AS examples
    FROM rejects GROUP BY source, reason ORDER BY source, num_records DESC, reason;

CREATE VIEW shape_summary AS
    SELECT source, modality, quantity, count(*) AS num_samples,
           round(quantile_cont(value, 0.05), 1) AS p5, round(quantile_cont(value, 0.5), 1) AS p50,
           round(quantile_cont(value, 0.95), 1) AS p95, round(quantile_cont(value, 0.99), 1) AS p99,
           max(value) AS max, sum(value) AS total,
           round(coalesce(stddev_pop(value) / nullif(avg(value), 0), 0), 3) AS coefficient_of_variation
    FROM (SELECT source, modality,
                 unnest(['num_items', 'text_tokens', 'vision_tokens', 'audio_tokens', 'llm_tokens']) AS quantity,
                 unnest([num_items, text_tokens, vision_tokens, audio_tokens, llm_tokens]) AS value FROM samples)
    GROUP BY ALL ORDER BY source, modality, quantity;
"""


class ShardFile(NamedTuple):
    """A shard's Parquet file, and where the shard begins: record `start` of those that `sampling` keeps, and row
    `first_row` of the manifest."""

    path: Path
    name: str
    source: str
    start: int
    first_row: int


class HeldOut(NamedTuple):
    """Samples held out for evaluation: all those of `sources`, and a `share` of the others that the seed draws."""

    sources: Sequence[str] = ()
    share: float = 0.0
    seed: int = 0


NOTHING_HELD_OUT = HeldOut()


def write_shapes(
    path: Path,
    shards: Sequence[ShardFile],
    sources: pl.DataFrame,
    meta: Mapping[str, str],
    *,
    sampled_rows: Mapping[str, np.ndarray],
    keep_duplicates: bool,
    held_out: HeldOut = NOTHING_HELD_OUT,
) -> None:
    """Merge shard files into `samples`, `rejects`, `sources` and the views `shape_summary` and `reject_summary`.

    `sources` has the columns name, path, media_root, sampling, digest and num_records, and may have epochs and weight;
    one row a source.
    `sampled_rows` gives, for each randomly sampled source, the rows of its manifest that were drawn. Of records that
    share an id in a source only the first is kept; with `keep_duplicates` all are kept, with a number after the id.
    Samples that are `held_out` have `evaluation` true.

    Raises:
        UserError: when there is no shard, that is, no record; or when a shard's file lacks a column.
    """
    if not shards:
        raise UserError("no manifest of `data.sources` holds any record (after its `sampling`); add data")
    sampled_schema = {"source": pl.String, "position": pl.Int64, "row": pl.Int64}
    sampled_frames = [
        pl.DataFrame({"source": source, "position": np.arange(len(rows)), "row": rows}, schema=sampled_schema)
        for source, rows in sampled_rows.items()
    ]
    mixing = [pl.lit(None, pl.Float64).alias(name) for name in ("epochs", "weight") if name not in sources.columns]
    frames = {
        "shard_frame": _shard_frame(shards, sources),
        "source_frame": sources.with_columns(mixing).with_row_index("position"),
        "sampled_frame": pl.concat([pl.DataFrame(schema=sampled_schema), *sampled_frames]),
    }
    for file, name in {shard.path: shard.name for shard in shards}.items():
        made_by = f"profile-shapes --shard {name}"
        # DuckDB, which reads the files below, looks at no checksum.
        if read_parquet(file, made_by=made_by).schema != SHARD_SCHEMA:
            raise UserError(f"{file} is not as this dflop writes shards; make it again with `dflop {made_by}`")
    # Equal sources share their files. Each file is read once, and the join repeats its rows for every such source.
    parameters = {
        "files": list(dict.fromkeys(str(shard.path) for shard in shards)),
        "keep_duplicates": keep_duplicates,
        "seed": str(held_out.seed),
        "evaluation_share": held_out.share,
        "evaluation_sources": list(held_out.sources),
    }
    write_database(path, _SHAPES_SQL, frames, meta, parameters)


def _shard_frame(shards: Sequence[ShardFile], sources: pl.DataFrame) -> pl.DataFrame:
    """One row a shard."""
    positions = {name: position for position, name in enumerate(sources["name"])}
    return pl.DataFrame(
        [
            (index, str(shard.path), shard.name, shard.source, positions[shard.source], shard.start, shard.first_row)
            for index, shard in enumerate(shards)
        ],
        schema={
            "position": pl.Int64,
            "path": pl.String,
            "name": pl.String,
            "source": pl.String,
            "source_position": pl.Int64,
            "start": pl.Int64,
            "first_row": pl.Int64,
        },
        orient="row",
    )
