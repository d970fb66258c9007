"""Every DuckDB table and every SQL statement of the project.

Rows are passed as polars frames; the folders that own them define their meaning.
"""

from dflop.store.database import SCHEMA_VERSION, read_meta, read_table, read_tables
from dflop.store.parquet import read_parquet, write_parquet
from dflop.store.results import write_costs, write_observations
from dflop.store.schemas import (
    CORRECTIONS_SCHEMA,
    LEFT_OUT_SCHEMA,
    LINK_MODEL_SCHEMA,
    LINKS_SCHEMA,
    LOADING_SCHEMA,
    MODALITIES,
    REJECT_REASONS,
    SHARD_SCHEMA,
    STEP_SECONDS_SCHEMA,
)
from dflop.store.shapes import HeldOut, ShardFile, write_shapes

__all__ = [
    "CORRECTIONS_SCHEMA",
    "LEFT_OUT_SCHEMA",
    "LINKS_SCHEMA",
    "LINK_MODEL_SCHEMA",
    "LOADING_SCHEMA",
    "MODALITIES",
    "REJECT_REASONS",
    "SCHEMA_VERSION",
    "SHARD_SCHEMA",
    "STEP_SECONDS_SCHEMA",
    "HeldOut",
    "ShardFile",
    "read_meta",
    "read_parquet",
    "read_table",
    "read_tables",
    "write_costs",
    "write_observations",
    "write_parquet",
    "write_shapes",
]
