"""What several folders of unit tests need: the tiny model's spec, a drawn dataset."""

import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Tests run side by side, and torch's threads, where there are more than cores, wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from made_up_family import made_up

from dflop.config import ModelConfig
from dflop.demo import DemoData, make_demo_data
from dflop.models import ModelSpec, load_model_spec
from dflop.shapes import ChatTokenizer

__all__ = ["made_up"]


@pytest.fixture(scope="session")
def tiny_spec() -> ModelSpec:
    return load_model_spec(ModelConfig(preset="tiny"))


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer()


@pytest.fixture(scope="session")
def little_cache() -> Iterator[None]:
    """Measurements fill a cache of 1 MiB first. Some servers' has 480 MiB, which takes longer than what is measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflop.costs.measure._cache_bytes", lambda device: 1 << 20)
        yield


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory) -> DemoData:
    return make_demo_data(tmp_path_factory.mktemp("demo") / "data", num_records=40, seed=5)


@pytest.fixture(scope="session")
def shape_table(shared_data) -> Callable[[str], list[dict[str, str]]]:
    """`shape_table(name)`: the rows of a table of real media's sizes."""

    def read(name: str) -> list[dict[str, str]]:
        with (shared_data / "shapes" / f"{name}.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return read


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder: caches and relative paths of a run lie below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    return tmp_path
