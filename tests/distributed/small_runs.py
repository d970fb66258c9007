"""A folder with all that training needs: a small dataset's shapes, made-up costs, and a config in float64."""

from collections.abc import Sequence
from pathlib import Path

import duckdb
import polars as pl
from made_up_costs import write_made_up_costs
from whole_model import reader_of

from dflop.config import load_config
from dflop.models import load_model_spec
from dflop.shapes import ChatTokenizer, ShapeProfiler, SourceRecords, list_sources
from dflop.store import ShardFile, write_shapes

__all__ = ["prepare"]

_META = {"config_digest": "", "code_digest": ""}


def prepare(
    folder: Path, manifests: Sequence[Path], family: str, preset: str = "tiny", max_llm_tokens: int = 4096
) -> tuple[Path, dict]:
    """Write the shapes of the manifests' samples and made-up costs into a folder; returns it with the config."""
    config = {
        "run": "test",
        "data": {"sources": [{"path": str(path)} for path in manifests], "max_llm_tokens": max_llm_tokens},
        "model": {"family": family, "preset": preset},
        "cluster": {"devices_per_node": 4},
        "schedule": {"policy": "lpt"},
        "train": {
            "global_batch_size": 8,
            "steps": 2,
            "lr": 1e-3,
            "grad_clip": 1e9,
            "precision": "fp64",
            "checkpoint_every": 2,
            "loader_workers": 0,
        },
    }
    loaded = load_config(config)
    reader, shards, sources = reader_of(loaded), [], []
    for source in list_sources(loaded.data):
        records = SourceRecords(source, 0)
        profiler = ShapeProfiler(
            source=source,
            reader=reader,
            tokenizer=ChatTokenizer(None, reader.rules),
            max_llm_tokens=loaded.data.max_llm_tokens,
        )
        frame = profiler.profile(records.read(row) for row in records.kept)
        frame.write_parquet(folder / f"{source.name}.parquet")
        shards.append(ShardFile(folder / f"{source.name}.parquet", source.name, source.name, 0, 0))
        about = dict.fromkeys(("path", "media_root"), "") | {"sampling": "all", "digest": "d"}
        sources.append({"name": source.name, "num_records": len(frame)} | about)
    tables = pl.DataFrame(sources)
    write_shapes(folder / "shapes.duckdb", shards, tables, _META, sampled_rows={}, keep_duplicates=False)
    modules = tuple(module.name for module in load_model_spec(loaded.model).modules)
    write_made_up_costs(folder / "costs.duckdb", tp_sizes=(1, 2, 4), modules=modules)
    with duckdb.connect(str(folder / "costs.duckdb")) as connection:  # some microbatches have more items
        connection.execute("UPDATE load_range SET most_num_items = 8 WHERE most_num_items > 8")
    return folder, config
