"""What several folders of unit tests need: the tiny model's spec, hand-made costs, drawn shapes, a drawn dataset."""

import csv
import os
from collections.abc import Callable
from pathlib import Path

# Tests run side by side, and torch's threads, where there are more than cores, wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from made_up_family import made_up
from run_folders import make_run

from dflop.config import ModelConfig
from dflop.demo import DemoData, make_demo_data
from dflop.models import ModelSpec, load_model_spec
from dflop.shapes import ChatTokenizer, MediaSizes, SampleShapes

__all__ = ["made_up", "make_run"]


@pytest.fixture(scope="session")
def tiny_spec() -> ModelSpec:
    return load_model_spec(ModelConfig(preset="tiny"))


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer()


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


@pytest.fixture(scope="session")
def draw_samples() -> Callable[..., SampleShapes]:
    """`draw_samples(num_samples, seed)`: skewed sizes, a fifth of the samples without media."""

    def draw(num_samples: int, seed: int = 0) -> SampleShapes:
        rng = np.random.default_rng(seed)
        num_items = np.minimum(1 + rng.geometric(0.12, num_samples), 37)
        num_items[rng.random(num_samples) < 0.2] = 0
        kept_vision_tokens = num_items * rng.integers(20, 40, num_samples)
        text_tokens = rng.integers(20, 300, num_samples)
        counts = np.where(num_items > 0, 1 + np.arange(num_samples) % 2, 0)
        sizes = np.column_stack([np.arange(counts.sum()) + 30, np.arange(counts.sum()) + 20, np.zeros(counts.sum())])
        return SampleShapes(
            encoders=("vision",),
            sample_id=np.array([f"s{index}" for index in range(num_samples)], dtype=object),
            source=np.full(num_samples, "drawn", dtype=object),
            row=np.arange(num_samples),
            num_items=num_items[:, None],
            kept_tokens=kept_vision_tokens[:, None],
            llm_tokens=kept_vision_tokens + text_tokens,
            target_tokens=text_tokens // 3 + 1,
            media=MediaSizes(sizes.astype(np.int32), counts),
        )

    return draw


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder: caches and relative paths of a run lie below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    return tmp_path
