"""Every DuckDB table and every SQL statement of the project.

A database is made in one go beside its final path and then only read: DuckDB lets one writer block all
readers. Rows come and go as polars frames; what they mean is said by the folders that own them.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from dflop.artifacts import written_whole
from dflop.errors import UserError

# DuckDB is imported where a file is opened: processes that only want the schemas, such as training's ranks,
# start sooner without it (and torch's threads keep it from unloading cleanly, which it complains about).
if TYPE_CHECKING:
    import duckdb

__all__ = [
    "MODALITIES",
    "REJECT_REASONS",
    "SCHEMA_VERSION",
    "SHARD_SCHEMA",
    "ShardFile",
    "read_meta",
    "read_table",
    "write_costs",
    "write_observations",
    "write_shapes",
]

SCHEMA_VERSION = 1

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
# records are inserted before it; `reason` and `detail` are null unless the record is rejected.
SHARD_SCHEMA = pl.Schema(
    {
        "row": pl.Int64,
        "sample_id": pl.String,
        "modality": pl.String,
        "num_images": pl.Int32,
        "num_frames": pl.Int32,
        "audio_s": pl.Float64,
        "num_items": pl.Int32,
        "vision_tokens": pl.Int32,
        "kept_vision_tokens": pl.Int32,
        "audio_tokens": pl.Int32,
        "text_tokens": pl.Int32,
        "target_tokens": pl.Int32,
        "llm_tokens": pl.Int32,
        "truncated": pl.Boolean,
        "reason": pl.String,
        "detail": pl.String,
    }
)

_SHAPES_SQL = """
CREATE TABLE sources AS
    SELECT name, path, media_root, sampling, digest, num_records FROM source_frame ORDER BY position;

CREATE TABLE records AS
    SELECT shard.position AS shard_position, shard.source, shard.start + shape.row AS row, shard.name AS shard,
           shape.* EXCLUDE (row, filename, sample_id),
           coalesce(shape.sample_id, shard.source || '/' || (shard.start + shape.row)) AS sample_id
    FROM read_parquet($files, filename = true) AS shape
    JOIN shard_frame AS shard ON shape.filename = shard.path;

CREATE TABLE marked AS
    SELECT *, row_number() OVER (PARTITION BY sample_id, reason IS NULL ORDER BY shard_position, row) AS occurrence
    FROM records;

CREATE TABLE samples AS
    SELECT sample_id, source, row, shard, modality, num_images, num_frames, audio_s, num_items, vision_tokens,
           audio_tokens, text_tokens, llm_tokens, truncated, kept_vision_tokens, target_tokens
    FROM marked WHERE reason IS NULL AND occurrence = 1 ORDER BY shard_position, row;

CREATE TABLE rejects AS
    SELECT source, row, sample_id, coalesce(reason, 'duplicate_id') AS reason,
           coalesce(detail, 'an earlier record has the same id') AS detail
    FROM marked WHERE reason IS NOT NULL OR occurrence > 1 ORDER BY shard_position, row;

DROP TABLE marked;
DROP TABLE records;

CREATE VIEW shape_summary AS
    SELECT source, modality, quantity, count(*) AS num_samples,
           round(quantile_cont(value, 0.05), 1) AS p5, round(quantile_cont(value, 0.5), 1) AS p50,
           round(quantile_cont(value, 0.95), 1) AS p95, round(quantile_cont(value, 0.99), 1) AS p99,
           max(value) AS max, sum(value) AS total,
           round(coalesce(stddev_pop(value) / nullif(avg(value), 0), 0), 3) AS coefficient_of_variation
    FROM (SELECT source, modality, unnest(['num_items', 'text_tokens', 'vision_tokens', 'llm_tokens']) AS quantity,
                 unnest([num_items, text_tokens, vision_tokens, llm_tokens]) AS value FROM samples)
    GROUP BY ALL ORDER BY source, modality, quantity;
"""

_COSTS_SQL = """
CREATE TABLE measurements AS SELECT * FROM measurements_frame;
CREATE TABLE time_model AS SELECT * FROM time_model_frame;
CREATE TABLE memory_model AS SELECT * FROM memory_model_frame;
CREATE TABLE fit_error AS SELECT * FROM fit_error_frame;
CREATE TABLE device AS SELECT * FROM device_frame;
"""

_OBSERVATIONS_SQL = """
CREATE TABLE observations AS SELECT * FROM observations_frame;
CREATE TABLE corrections AS
    SELECT module, pass, count(*) AS num_observations, sum(seconds) AS measured_s, sum(predicted_s) AS predicted_s,
           sum(seconds) / nullif(sum(predicted_s), 0) AS ratio
    FROM observations WHERE NOT warmup GROUP BY module, pass ORDER BY module, pass;
"""


class ShardFile(NamedTuple):
    """A shard's Parquet file and where its records begin in the source."""

    path: Path
    name: str
    source: str
    start: int


def write_shapes(path: Path, shards: Sequence[ShardFile], sources: pl.DataFrame, meta: Mapping[str, str]) -> None:
    """Merge shard files into `samples`, `rejects`, `sources` and the view `shape_summary`.

    `sources` has the columns name, path, media_root, sampling, digest and num_records, one row a source.

    Raises:
        UserError: when there is no shard, that is, no record.
    """
    if not shards:
        raise UserError("no manifest of `data.sources` holds any record (after its `sampling`); add data")
    shard_frame = pl.DataFrame(
        [(index, str(shard.path), shard.name, shard.source, shard.start) for index, shard in enumerate(shards)],
        schema={"position": pl.Int64, "path": pl.String, "name": pl.String, "source": pl.String, "start": pl.Int64},
        orient="row",
    )
    source_frame = sources.with_row_index("position")
    _write(
        path,
        _SHAPES_SQL,
        {"shard_frame": shard_frame, "source_frame": source_frame},
        meta,
        {"files": [str(shard.path) for shard in shards]},
    )


def write_costs(path: Path, frames: Mapping[str, pl.DataFrame], meta: Mapping[str, str]) -> None:
    """Write `measurements`, `time_model`, `memory_model`, `fit_error` and `device`, given under these names."""
    _write(path, _COSTS_SQL, {f"{name}_frame": frame for name, frame in frames.items()}, meta)


def write_observations(path: Path, observations: pl.DataFrame, meta: Mapping[str, str]) -> None:
    """Write `observations` and what follows from them, `corrections` (measured over predicted time)."""
    _write(path, _OBSERVATIONS_SQL, {"observations_frame": observations}, meta)


def read_table(path: Path, table: str, *, made_by: str) -> pl.DataFrame:
    """One whole table or view.

    Raises:
        UserError: when the file is missing or was written with another schema version; `made_by` is the
            command that makes it.
    """
    with _open(path, made_by) as connection:
        names = {name for (name,) in connection.execute("SELECT table_name FROM information_schema.tables").fetchall()}
        if table not in names:
            raise UserError(f"{path} has no table `{table}`; make the file again with `dflop {made_by}`")
        return connection.sql(f'SELECT * FROM "{table}"').pl()


def read_meta(path: Path, *, made_by: str) -> dict[str, str]:
    with _open(path, made_by) as connection:
        return dict(connection.execute("SELECT key, value FROM meta").fetchall())


def _open(path: Path, made_by: str) -> "duckdb.DuckDBPyConnection":
    import duckdb

    if not path.is_file():
        raise UserError(f"{path} does not exist; make it with `dflop {made_by}`")
    try:
        connection = duckdb.connect(str(path), read_only=True)
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    except duckdb.Error as error:
        raise UserError(
            f"{path} is not a dflop database ({str(error).splitlines()[0]}); remake it: `dflop {made_by}`"
        ) from None
    if row is None or row[0] != str(SCHEMA_VERSION):
        connection.close()
        raise UserError(
            f"{path} has schema version {row[0] if row else 'unknown'}, this dflop writes {SCHEMA_VERSION}; "
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
            connection.execute(statement, parameters if parameters and "$files" in statement else None)
