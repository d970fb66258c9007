"""What pages take from the code: the tables of a run with their columns, as the code has just written them.

A small run without training is made of the demo's data, with analytic costs of an H100. It takes a few seconds.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import duckdb
import polars as pl
import yaml

from dflop.cli import cli
from dflop.config import load_config
from dflop.data.manifests import list_shards, list_sources
from dflop.store import (
    CORRECTIONS_SCHEMA,
    LEFT_OUT_SCHEMA,
    LINKS_SCHEMA,
    LOADING_SCHEMA,
    STEP_SECONDS_SCHEMA,
    write_observations,
)
from dflop.training.observations import OBSERVATIONS_SCHEMA

__all__ = ["make"]

CONFIG = {
    "run": "docs",
    "data": {"sources": [{"path": "data/train.json"}]},
    "model": {"preset": "llava_ov_7b"},
    "cluster": {"device": "cuda", "device_model": "h100-80g", "devices_per_node": 8},
    "costs": {"source": "analytic"},
    "plan": {
        "search_batches": 2,
        "fixed": {"placement": "disjoint", "vision": {"dp": 4}, "llm": {"pp": 4, "dp": 1}, "num_microbatches": 16},
    },
    "train": {"precision": "bf16", "global_batch_size": 64},
}


def make(folder: Path) -> None:
    """Write `tables.md` into a folder."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            run_without_training()
        (folder / "tables.md").write_text("\n".join(table_lines()) + "\n", encoding="utf-8")


def run_without_training() -> None:
    """Leave the files of a run, as far as a plan's schedule, in the current folder; those of training are empty."""
    text = json.dumps(CONFIG)

    def dflop(*arguments: object) -> None:
        cli([str(part) for part in arguments], standalone_mode=False)

    dflop("demo-data", "--out", "data", "--records", 100)
    data = load_config(text).data
    for source in list_sources(data):
        for shard in list_shards(source, data.samples_per_shard, 0):
            out = f"shapes/{shard.name}.parquet"
            dflop("profile-shapes", "--config", text, "--shard", shard.name, "--out", out, "--workers", 1)
    dflop("merge-shapes", "--config", text, "--shapes", "shapes", "--out", "shapes.duckdb", "--bounds", "bounds.json")
    measurements = [f"costs/{module}.tp1.parquet" for module in ("vision", "llm")]
    for module, out in zip(("vision", "llm"), measurements, strict=True):
        dflop("profile-costs", "--config", text, "--module", module, "--tp", 1, "--out", out)
    dflop("fit-costs", *measurements, "--out", "costs.duckdb")
    inputs = ("--config", text, "--shapes", "shapes.duckdb", "--costs", "costs.duckdb")
    dflop("plan", *inputs, "--out", "plan.yaml", "--candidates", "candidates.parquet")
    dflop("schedule", *inputs, "--plan", "plan.yaml", "--out", "schedule.parquet")

    empty = {"links": LINKS_SCHEMA, "loading": LOADING_SCHEMA}
    for name, schema in empty.items():
        pl.DataFrame(schema=schema).write_parquet(f"{name}.parquet")
    observed = (OBSERVATIONS_SCHEMA, CORRECTIONS_SCHEMA, LEFT_OUT_SCHEMA, STEP_SECONDS_SCHEMA)
    write_observations(Path("observations.duckdb"), *(pl.DataFrame(schema=schema) for schema in observed), {})


def table_lines() -> Iterator[str]:
    """The page's text: a section a file, and in it a table of columns for each table.

    What they mean stands in `columns.yaml`, which must name exactly the tables and columns that there are.
    """
    described = yaml.safe_load((Path(__file__).parent / "columns.yaml").read_text(encoding="utf-8"))
    shared = described.pop("columns")
    for name, file in described.items():
        yield f"\n## `{file['path']}`\n"
        yield f"{file['about']}\n"
        columns = columns_of(Path(name))
        if columns.keys() != file["tables"].keys():
            raise ValueError(f"docs/columns.yaml gives {name} the tables {[*file['tables']]}: it has {[*columns]}")
        for table, own in file["tables"].items():
            if len(columns) > 1:
                yield f"### `{table}`\n"
            yield f"{own['about']}\n"
            yield "| column | type | meaning |\n|---|---|---|"
            meanings = own.get("columns") or {}
            if missing := [column for column in columns[table] if column not in shared | meanings]:
                raise ValueError(f"docs/columns.yaml does not say what {', '.join(missing)} of {name}, {table}, mean")
            if left := meanings.keys() - columns[table].keys():
                raise ValueError(f"docs/columns.yaml describes {', '.join(left)}, which {name}, {table}, does not have")
            for column, kind in columns[table].items():
                yield f"| `{column}` | {kind} | {(shared | meanings)[column]} |"
            yield ""


def columns_of(path: Path) -> dict[str, dict[str, str]]:
    """Types by column, by table, of a DuckDB or a Parquet file; `meta`, which all DuckDB files have, is left out."""
    if path.suffix == ".parquet":
        return {
            path.stem: dict(duckdb.execute(f"SELECT column_name, column_type FROM (DESCRIBE FROM '{path}')").fetchall())
        }
    with duckdb.connect(str(path), read_only=True) as database:
        tables = [name for (name,) in database.execute("SELECT table_name FROM information_schema.tables").fetchall()]
        return {
            table: {row[0]: row[1] for row in database.execute(f'DESCRIBE "{table}"').fetchall()}
            for table in tables
            if table != "meta"
        }
