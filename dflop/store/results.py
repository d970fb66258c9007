"""`costs.duckdb` and `observations.duckdb`: one table for each frame, and tables computed from them."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from dflop.store.database import write_database
from dflop.store.schemas import LINK_MODEL_SCHEMA, LINKS_SCHEMA

__all__ = ["write_costs", "write_observations"]

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
CREATE TABLE step_seconds AS SELECT * FROM step_seconds_frame ORDER BY step, rank;
CREATE TABLE measured_over_predicted AS
    SELECT module, pass, count(*) AS num_observations, sum(seconds) AS measured_s, sum(predicted_s) AS predicted_s,
           sum(seconds) / nullif(sum(predicted_s), 0) AS ratio
    FROM observations WHERE NOT warmup GROUP BY module, pass ORDER BY module, pass;
"""


def write_costs(path: Path, frames: Mapping[str, pl.DataFrame], meta: Mapping[str, str]) -> None:
    """Write `measurements`, `time_model`, `memory_model`, `load_range`, `fit_error` and `device` from `frames`.

    `links` and `link_model` may be left out: they are empty where no links were measured.
    """
    no_links = {"links": pl.DataFrame(schema=LINKS_SCHEMA), "link_model": pl.DataFrame(schema=LINK_MODEL_SCHEMA)}
    write_database(
        path, _COSTS_SQL, {f"{name}_frame": frame for name, frame in (no_links | dict(frames)).items()}, meta
    )


def write_observations(
    path: Path,
    observations: pl.DataFrame,
    corrections: pl.DataFrame,
    rejects: pl.DataFrame,
    step_seconds: pl.DataFrame,
    meta: Mapping[str, str],
) -> None:
    """Write one table for each of these frames, and `measured_over_predicted`, which is computed from `observations`.

    `rejects` are the samples that the run left out (`LEFT_OUT_SCHEMA`); `step_seconds` divides each step's time on
    each rank (`STEP_SECONDS_SCHEMA`).
    """
    frames = {
        "observations": observations,
        "corrections": corrections,
        "rejects": rejects,
        "step_seconds": step_seconds,
    }
    write_database(path, _OBSERVATIONS_SQL, {f"{name}_frame": frame for name, frame in frames.items()}, meta)
