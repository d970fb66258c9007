"""What several tests of training need: a small dataset with its shapes, made-up costs and a config in float64."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from processes import preload
from whole_model import reader_of

from dflop.config import load_config
from dflop.data import ChatTokenizer, ShapeProfiler, SourceRecords, list_sources
from dflop.data.demo import make_demo_data
from dflop.store import ShardFile, write_shapes

preload()

_META = {"config_digest": "", "code_digest": ""}


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """The manifest of a small dataset."""
    folder = tmp_path_factory.mktemp("data")
    make_demo_data(folder, num_records=48)
    return folder / "train.json"


@pytest.fixture(scope="session")
def run(dataset, write_made_up_costs, tmp_path_factory):
    """A folder with a small dataset's shapes, made-up costs, and a config in float64."""
    return _prepare(tmp_path_factory.mktemp("run"), dataset, "llava_onevision", write_made_up_costs)


@pytest.fixture(scope="session")
def internvl_run(dataset, write_made_up_costs, tmp_path_factory):
    """The same for InternVL."""
    return _prepare(tmp_path_factory.mktemp("internvl-run"), dataset, "internvl", write_made_up_costs)


@pytest.fixture(scope="session")
def qwen_run(dataset, write_made_up_costs, tmp_path_factory):
    """The same for Qwen2.5-VL."""
    return _prepare(tmp_path_factory.mktemp("qwen-run"), dataset, "qwen2_5_vl", write_made_up_costs)


def _prepare(folder: Path, dataset: Path, family: str, write_made_up_costs: Callable[..., None]) -> tuple[Path, dict]:
    config = {
        "run": "test",
        "data": {"sources": [{"path": str(dataset)}], "max_llm_tokens": 4096},
        "model": {"family": family, "preset": "tiny"},
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
    (source,) = list_sources(loaded.data)
    records = SourceRecords(source, 0)
    reader = reader_of(loaded)
    profiler = ShapeProfiler(
        source=source,
        reader=reader,
        tokenizer=ChatTokenizer(None, reader.rules),
        max_llm_tokens=loaded.data.max_llm_tokens,
    )
    frame = profiler.profile(records.read(row) for row in records.kept)
    frame.write_parquet(folder / "shard.parquet")
    sources = pl.DataFrame(
        {
            "name": ["train"],
            "path": [""],
            "media_root": [""],
            "sampling": ["all"],
            "digest": ["d"],
            "num_records": [len(frame)],
        }
    )
    shards = [ShardFile(folder / "shard.parquet", "shard", "train", 0, 0)]
    write_shapes(folder / "shapes.duckdb", shards, sources, _META, sampled_rows={}, keep_duplicates=False)
    write_made_up_costs(folder / "costs.duckdb", tp_sizes=(1, 2, 4))
    return folder, config
