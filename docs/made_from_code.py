"""What pages take from the code: the tables of a run with their columns, as the code has just written them.

A small run without training is made of the demo's data, with analytic costs of H100s: a few seconds. A figure shows one
of its steps.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import yaml

from dflop.cli import cli
from dflop.config import ModelConfig, load_config
from dflop.models import load_model_spec
from dflop.plan import plan_from_dict
from dflop.report.boxes import StepPanel, predicted_boxes
from dflop.report.charts.timeline import draw_timeline
from dflop.report.picture import write_picture
from dflop.report.schedules import replay
from dflop.schedule.service import open_scheduler
from dflop.search.emit import FRAMEWORKS, emit
from dflop.shapes.manifests import list_shards, list_sources
from dflop.store import (
    CORRECTIONS_SCHEMA,
    LEFT_OUT_SCHEMA,
    LINKS_SCHEMA,
    LOADING_SCHEMA,
    STEP_SECONDS_SCHEMA,
    write_observations,
)
from dflop.train.observations import OBSERVATIONS_SCHEMA

__all__ = ["make"]

# One rank of the encoder before an LLM of four stages.
CONFIG = {
    "run": "docs",
    "data": {"sources": [{"path": "data/train.json"}]},
    "model": {"preset": "llava_ov_7b"},
    "cluster": {"device": "cuda", "device_model": "h100-80g", "devices_per_node": 5},
    "costs": {"source": "analytic"},
    "plan": {
        "search_batches": 2,
        "fixed": {
            "placement": "disjoint",
            "vision": {"dp": 1},
            "llm": {"pp": 4, "dp": 1},
            "num_microbatches": 16,
            "schedule": "1f1b",
        },
    },
    "train": {"precision": "bf16", "global_batch_size": 64},
}
POLICIES = {
    "random": "as it comes (random)",
    "lpt": "even microbatches (lpt)",
    "search": "unequal microbatches (search)",
}


def make(folder: Path) -> None:
    """Write `tables.md`, `emitted.md` and `unequal-microbatches.svg` into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "emitted.md").write_text("\n".join(emitted_lines()) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            run_without_training()
            draw_unequal_microbatches(folder / "unequal-microbatches.svg")
        (folder / "tables.md").write_text("\n".join(table_lines()) + "\n", encoding="utf-8")


def dflop(*arguments: object) -> None:
    """One command, in this process."""
    cli([str(part) for part in arguments], standalone_mode=False)


def shapes_and_costs(config: dict[str, Any]) -> None:
    """Leave `shapes.duckdb` and analytic `costs.duckdb` of the data that a config names in the current folder."""
    text = json.dumps(config)
    loaded = load_config(text)
    for source in list_sources(loaded.data):
        for shard in list_shards(source, loaded.data.samples_per_shard, 0):
            out = f"shapes/{shard.name}.parquet"
            dflop("profile-shapes", "--config", text, "--shard", shard.name, "--out", out, "--workers", 1)
    dflop("merge-shapes", "--config", text, "--shapes", "shapes", "--out", "shapes.duckdb", "--bounds", "bounds.json")
    measurements = []
    for module in ("vision", "llm"):
        for tp in loaded.costs.tp_sizes:
            measurements.append(f"costs/{module}.tp{tp}.parquet")
            dflop("profile-costs", "--config", text, "--module", module, "--tp", tp, "--out", measurements[-1])
    dflop("fit-costs", *measurements, "--out", "costs.duckdb")


def run_without_training() -> None:
    """Leave the files of a run, as far as a plan's schedule, in the current folder; those of training are empty."""
    dflop("demo-data", "--out", "data", "--records", 100)
    shapes_and_costs(CONFIG)
    inputs = ("--config", json.dumps(CONFIG), "--shapes", "shapes.duckdb", "--costs", "costs.duckdb")
    dflop("plan", *inputs, "--out", "plan.yaml", "--candidates", "candidates.parquet")
    dflop("schedule", *inputs, "--plan", "plan.yaml", "--out", "schedule.parquet")

    for name, schema in {"links": LINKS_SCHEMA, "loading": LOADING_SCHEMA}.items():
        pl.DataFrame(schema=schema).write_parquet(f"{name}.parquet")
    observed = (OBSERVATIONS_SCHEMA, CORRECTIONS_SCHEMA, LEFT_OUT_SCHEMA, STEP_SECONDS_SCHEMA)
    write_observations(Path("observations.duckdb"), *(pl.DataFrame(schema=schema) for schema in observed), {})


def draw_unequal_microbatches(path: Path) -> None:
    """One global batch as it comes, in even buckets, and as the search makes it, on the plan of the current folder."""
    files = {
        name: Path(f"{name}.{ending}") for name, ending in (("shapes", "duckdb"), ("costs", "duckdb"), ("plan", "yaml"))
    }
    with open_scheduler(load_config(json.dumps(CONFIG)), **files).open() as scheduler:
        panels = []
        for policy, what in POLICIES.items():
            schedule = scheduler.schedule(0, policy)
            _, timeline = replay(scheduler, schedule)
            over = timeline.step_s / schedule.lower_bound_s
            title = f"{what}: {timeline.step_s:.2f} s, {over:.2f}x the lower bound, idle {timeline.idle:.0%}"
            panels.append(StepPanel(title, predicted_boxes(scheduler.pricer.plan, timeline), timeline.step_s))
        plan = scheduler.pricer.plan
    finding = "One global batch, the same samples and the same plan, grouped in three ways"
    write_picture(draw_timeline(panels, plan, finding), path)


def emitted_lines() -> Iterator[str]:
    """The plan of the what-if page for a 7B on 64 H100s, in the words of each framework that can run it."""
    wanted = {"model": "llava_ov_7b", "card": "h100-80g", "devices": 64, "mix": "pictures, clips and texts"}
    rows = json.loads((Path(__file__).parent / "what-if.json").read_text(encoding="utf-8"))
    plan = plan_from_dict(next(row for row in rows if wanted.items() <= row.items())["plan"])
    spec = load_model_spec(ModelConfig(preset=wanted["model"]))
    for name, framework in FRAMEWORKS.items():
        yield f"\n## `{name}`\n"
        if refusal := framework.refusal(plan):
            yield f"{framework.release} cannot run it: {refusal}."
        else:
            text = emit(name, plan, spec, 8 * wanted["devices"]).to_text(framework, plan)
            yield f"```{'yaml' if framework.is_config else 'bash'}\n{text}\n```"


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
