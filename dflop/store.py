"""Every DuckDB table and every SQL statement of the project.

A database is made in one go beside its final path and then only read: DuckDB lets one writer block all
readers. Rows come and go as polars frames; what they mean is said by the folders that own them.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from dflop.runtime import UserError, written_whole

# DuckDB is imported where a file is opened: processes that only want the schemas, such as training's ranks,
# start sooner without it (and torch's threads keep it from unloading cleanly, which it complains about).
if TYPE_CHECKING:
    import duckdb

__all__ = [
    "CORRECTIONS_SCHEMA",
    "LEFT_OUT_SCHEMA",
    "LINKS_SCHEMA",
    "LINK_MODEL_SCHEMA",
    "MODALITIES",
    "REJECT_REASONS",
    "SCHEMA_VERSION",
    "SHARD_SCHEMA",
    "ShardFile",
    "read_meta",
    "read_table",
    "read_tables",
    "write_costs",
    "write_observations",
    "write_shapes",
]

# To be raised with every change of a table's columns or of their meaning: older files are then refused, not misread.
SCHEMA_VERSION = 4

MODALITIES = ("text", "image", "multi_image", "video", "audio", "mixed")

REJECT_REASONS = (
    "missing_media",
    "unreadable_media",
    "bad_record",
    "placeholder_mismatch",
    "empty",
    "path_escape",
    "too_long",
    "duplicate_id",
)

# One row a record of a shard. `row` counts inside the shard, so that a shard's file stays valid when
# records are inserted before it; `reason` and `detail` are null unless the record is rejected. The lists hold a number
# a medium, in the record's order: width and height in pixels of a picture or of a clip's frames, and how many frames
# are taken of a clip (0 of a picture). Training lays out its text by them, without opening a medium.
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
        "vision_tokens": pl.Int32,
        "kept_vision_tokens": pl.Int32,
        "audio_tokens": pl.Int32,
        "text_tokens": pl.Int32,
        "target_tokens": pl.Int32,
        "llm_tokens": pl.Int32,
        "truncated": pl.Boolean,
        "media_width": pl.List(pl.Int32),
        "media_height": pl.List(pl.Int32),
        "media_frames": pl.List(pl.Int32),
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

# One row a shape bin of a module and pass: loads (items of encoders, tokens of the LLM) and, for the LLM, mean segments
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

_SHAPES_SQL = """
CREATE TABLE sources AS
    SELECT name, path, media_root, sampling, digest, num_records FROM source_frame ORDER BY position;

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

-- What stands before a number: more `#` than any id has in a row, so that no numbered id is another's own.
CREATE TABLE numbering AS
    SELECT repeat('#', 1 + coalesce(max(len(run)), 0)) AS mark
    FROM (SELECT unnest(regexp_extract_all(given_id, '#+')) AS run FROM named WHERE contains(given_id, '#'));

CREATE TABLE samples AS
    SELECT CASE WHEN number > 1 THEN given_id || (SELECT mark FROM numbering) || number ELSE given_id END AS sample_id,
           source, manifest_row AS row, shard, modality, num_images, num_frames, audio_s, num_items, vision_tokens,
           audio_tokens, text_tokens, llm_tokens, truncated, kept_vision_tokens, target_tokens, num_audio_windows,
           audio_rate_hz, media_width, media_height, media_frames
    FROM (SELECT *, row_number() OVER (PARTITION BY given_id ORDER BY is_unnamed, shard_position, shard_row) AS number
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

_COSTS_SQL = """
CREATE TABLE measurements AS SELECT * FROM measurements_frame;
CREATE TABLE time_model AS SELECT * FROM time_model_frame;
CREATE TABLE memory_model AS SELECT * FROM memory_model_frame;
CREATE TABLE load_range AS SELECT * FROM load_range_frame;
CREATE TABLE fit_error AS SELECT * FROM fit_error_frame;
CREATE TABLE device AS SELECT * FROM device_frame;
CREATE TABLE links AS SELECT * FROM links_frame;
CREATE TABLE link_model AS SELECT * FROM link_model_frame;
"""

_OBSERVATIONS_SQL = """
CREATE TABLE observations AS SELECT * FROM observations_frame;
CREATE TABLE rejects AS SELECT * FROM rejects_frame;
CREATE TABLE corrections AS SELECT * FROM corrections_frame;
CREATE TABLE measured_over_predicted AS
    SELECT module, pass, count(*) AS num_observations, sum(seconds) AS measured_s, sum(predicted_s) AS predicted_s,
           sum(seconds) / nullif(sum(predicted_s), 0) AS ratio
    FROM observations WHERE NOT warmup GROUP BY module, pass ORDER BY module, pass;
"""


class ShardFile(NamedTuple):
    """A shard's Parquet file, and where its records begin: among those that are kept, and in the manifest."""

    path: Path
    name: str
    source: str
    start: int
    first_row: int


def write_shapes(
    path: Path,
    shards: Sequence[ShardFile],
    sources: pl.DataFrame,
    meta: Mapping[str, str],
    *,
    sampled_rows: Mapping[str, np.ndarray],
    keep_duplicates: bool,
) -> None:
    """Merge shard files into `samples`, `rejects`, `sources` and the views `shape_summary` and `reject_summary`.

    `sources` has the columns name, path, media_root, sampling, digest and num_records, one row a source;
    `sampled_rows` the manifest's rows of randomly sampled sources. Of records that share an id in a source
    the first is kept, or, with `keep_duplicates`, all under names of their own.

    Raises:
        UserError: when there is no shard, that is, no record; or when a shard's file lacks a column.
    """
    import duckdb

    if not shards:
        raise UserError("no manifest of `data.sources` holds any record (after its `sampling`); add data")
    positions = {name: position for position, name in enumerate(sources["name"])}
    shard_frame = pl.DataFrame(
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
    sampled_schema = {"source": pl.String, "position": pl.Int64, "row": pl.Int64}
    sampled_frames = [
        pl.DataFrame({"source": source, "position": np.arange(len(rows)), "row": rows}, schema=sampled_schema)
        for source, rows in sampled_rows.items()
    ]
    frames = {
        "shard_frame": shard_frame,
        "source_frame": sources.with_row_index("position"),
        "sampled_frame": pl.concat([pl.DataFrame(schema=sampled_schema), *sampled_frames]),
    }
    # Sources that are the same have the same files; the join with their shards counts a file for each.
    parameters = {"files": list(dict.fromkeys(str(shard.path) for shard in shards)), "keep_duplicates": keep_duplicates}
    try:
        _write(path, _SHAPES_SQL, frames, meta, parameters)
    except (duckdb.BinderException, duckdb.InvalidInputException) as error:
        raise UserError(
            f"the shards in {shards[0].path.parent} are not as this dflop writes them ({str(error).splitlines()[0]}); "
            "make them again with `dflop profile-shapes`"
        ) from None


def write_costs(path: Path, frames: Mapping[str, pl.DataFrame], meta: Mapping[str, str]) -> None:
    """Write `measurements`, `time_model`, `memory_model`, `load_range`, `fit_error` and `device` from `frames`.

    `links` and `link_model` may be left out: they are empty where no links were measured.
    """
    no_links = {"links": pl.DataFrame(schema=LINKS_SCHEMA), "link_model": pl.DataFrame(schema=LINK_MODEL_SCHEMA)}
    _write(path, _COSTS_SQL, {f"{name}_frame": frame for name, frame in (no_links | dict(frames)).items()}, meta)


def write_observations(
    path: Path, observations: pl.DataFrame, corrections: pl.DataFrame, rejects: pl.DataFrame, meta: Mapping[str, str]
) -> None:
    """Write `observations`, `measured_over_predicted`, which follows from them, `corrections`, and `rejects`, the
    samples that the run left out (`LEFT_OUT_SCHEMA`)."""
    frames = {"observations": observations, "corrections": corrections, "rejects": rejects}
    _write(path, _OBSERVATIONS_SQL, {f"{name}_frame": frame for name, frame in frames.items()}, meta)


def read_table(path: Path, table: str, *, made_by: str) -> pl.DataFrame:
    """One whole table or view.

    Raises:
        UserError: when the file is missing or was written with another schema version; `made_by` is the
            command that makes it.
    """
    with _open(path, made_by) as connection:
        return _rows_of(connection, path, table, made_by).pl()


def read_tables(path: Path, tables: Sequence[str], *, made_by: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of some small tables.

    Raises:
        UserError: as `read_table` does.
    """
    found = {}
    with _open(path, made_by) as connection:
        for table in tables:
            rows = _rows_of(connection, path, table, made_by)
            found[table] = [dict(zip(rows.columns, row, strict=True)) for row in rows.fetchall()]
    return found


def read_meta(path: Path, *, made_by: str) -> dict[str, str]:
    with _open(path, made_by) as connection:
        return dict(connection.execute("SELECT key, value FROM meta").fetchall())


def _rows_of(
    connection: "duckdb.DuckDBPyConnection", path: Path, table: str, made_by: str
) -> "duckdb.DuckDBPyRelation":
    import duckdb

    try:
        return connection.sql(f'SELECT * FROM "{table}"')
    except duckdb.CatalogException:
        raise UserError(f"{path} has no table `{table}`; make the file again with `dflop {made_by}`") from None
    except duckdb.Error as error:
        raise UserError(
            f"{path}: table `{table}` cannot be read ({str(error).splitlines()[0]}); remake it: `dflop {made_by}`"
        ) from None


def _open(path: Path, made_by: str) -> "duckdb.DuckDBPyConnection":
    import duckdb

    if not path.is_file():
        raise UserError(f"{path} does not exist; make it with `dflop {made_by}`")
    try:
        connection = duckdb.connect(str(path), read_only=True)
        found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()
    except duckdb.Error as error:
        raise UserError(
            f"{path} is not a dflop database ({str(error).splitlines()[0]}); remake it: `dflop {made_by}`"
        ) from None
    if found != [(str(SCHEMA_VERSION),)]:
        connection.close()
        raise UserError(
            f"{path} has schema version {found[0][0] if found else 'unknown'}, this dflop writes {SCHEMA_VERSION}; "
            f"remake it with `dflop {made_by}`"
        )
    return connection


def _write(
    path: Path,
    statements: str,
    frames: Mapping[str, pl.DataFrame],
    meta: Mapping[str, str],
    parameters: Mapping[str, object] | None = None,
) -> None:
    import duckdb

    whole_meta = {
        "schema_version": str(SCHEMA_VERSION),
        "dflop_version": version("dflop"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **meta,
    }
    with written_whole(path) as beside, duckdb.connect(str(beside)) as connection:
        for name, frame in frames.items():
            connection.register(name, frame)
        connection.execute("CREATE TABLE meta (key VARCHAR PRIMARY KEY, value VARCHAR)")
        connection.executemany("INSERT INTO meta VALUES (?, ?)", list(whole_meta.items()))
        for statement in filter(str.strip, statements.split(";\n")):
            used = {name: value for name, value in (parameters or {}).items() if f"${name}" in statement}
            connection.execute(statement, used or None)
