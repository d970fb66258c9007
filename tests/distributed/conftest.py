"""What several tests of training need: a small dataset with its shapes, made-up costs and a config in float64."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

# Of oracles and of the server that ranks are forked from; ranks have as many as training gives them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import polars as pl
import pytest
from processes import preload
from whole_model import reader_of

from dflop.config import load_config
from dflop.demo import make_demo_data
from dflop.models import load_model_spec
from dflop.shapes import ChatTokenizer, ShapeProfiler, SourceRecords, list_sources
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
    return _prepare(tmp_path_factory.mktemp("run"), [dataset], "llava_onevision", write_made_up_costs)


@pytest.fixture(scope="session")
def internvl_run(dataset, write_made_up_costs, tmp_path_factory):
    """The same for InternVL."""
    return _prepare(tmp_path_factory.mktemp("internvl-run"), [dataset], "internvl", write_made_up_costs)


@pytest.fixture(scope="session")
def qwen_run(dataset, write_made_up_costs, tmp_path_factory):
    """The same for Qwen2.5-VL."""
    return _prepare(tmp_path_factory.mktemp("qwen-run"), [dataset], "qwen2_5_vl", write_made_up_costs)


@pytest.fixture(scope="session")
def qwen3_run(dataset, write_made_up_costs, tmp_path_factory):
    """The same for Qwen3-VL."""
    return _prepare(tmp_path_factory.mktemp("qwen3-run"), [dataset], "qwen3_vl", write_made_up_costs)


@pytest.fixture(scope="session")
def omni_run(dataset, write_made_up_costs, tmp_path_factory):
    """The same for Qwen2.5-Omni's thinker: sounds, too, and records of several kinds of media."""
    entries = {name: json.loads((dataset.parent / name).read_text()) for name in ("train.json", "audio.json")}
    sounds = [entry["audio"] for entry in entries["audio.json"]]
    pictures = [entry["image"] for entry in entries["train.json"] if isinstance(entry.get("image"), str)]
    clips = [entry["video"] for entry in entries["train.json"] if "video" in entry]
    answer = {"from": "gpt", "value": "Several things at once."}
    mixed = [
        {"image": pictures[0], "audio": sounds[0], "said": "<image>\nWhat does one hear here?\n<audio>"},
        {"audio": sounds[:2], "video": clips[0], "said": "First <audio>, then <audio>, and now <video>?"},
        {"video": clips[1], "image": pictures[1], "said": "Is <video> more than <image>?"},
    ]
    records = [
        {"id": f"mixed-{number}", "conversations": [{"from": "human", "value": entry.pop("said")}, answer], **entry}
        for number, entry in enumerate(mixed)
    ]
    path = dataset.parent / "mixed.json"
    path.write_text(json.dumps(records))
    manifests = (dataset, dataset.with_name("audio.json"), path)
    folder = tmp_path_factory.mktemp("omni-run")
    return _prepare(folder, manifests, "qwen2_5_omni_thinker", write_made_up_costs)


def _prepare(
    folder: Path, manifests: Sequence[Path], family: str, write_made_up_costs: Callable[..., None]
) -> tuple[Path, dict]:
    config = {
        "run": "test",
        "data": {"sources": [{"path": str(path)} for path in manifests], "max_llm_tokens": 4096},
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
    return folder, config
