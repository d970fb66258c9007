"""What loading takes is measured with training's own loaders, on samples of every modality that a module reads."""

import json
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from dflop.base import UserError
from dflop.cli import cli
from dflop.loading import LoadingTimes, read_loading_times
from dflop.loading import measure as measure_loading
from dflop.store import LOADING_SCHEMA, read_table


def dflop(command: str, config: dict, *arguments: object) -> str:
    result = CliRunner().invoke(cli, [command, "--config", json.dumps(config), *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def profiled(demo_data, tmp_path):
    """`profiled(media_root)`: a config of the demo's records, and their shapes.duckdb."""

    def profile(media_root: Path | None = None) -> tuple[dict, Path]:
        manifest = demo_data.train_manifest
        source = {"path": str(manifest), "media_root": str(media_root or manifest.parent)}
        config = {"data": {"sources": [source]}}
        shard = dflop("list-shards", config).split("\t", maxsplit=1)[0]
        shapes = tmp_path / "shapes.duckdb"
        dflop("profile-shapes", config, "--shard", shard, "--out", tmp_path / f"shapes/{shard}.parquet")
        dflop("merge-shapes", config, "--shapes", tmp_path / "shapes", "--out", shapes)
        return config, shapes

    return profile


def test_every_modality_is_loaded_by_the_modules_that_read_it(profiled, tmp_path, monkeypatch):
    monkeypatch.setattr(measure_loading, "MOST_SAMPLES", 2)
    config, shapes = profiled()
    printed = dflop("profile-loading", config, "--shapes", shapes, "--out", tmp_path / "loading.parquet")
    frame = read_loading_times(tmp_path / "loading.parquet").frame
    samples = read_table(shapes, "samples", made_by="merge-shapes").filter(pl.col("num_audio_windows") == 0)
    counts = dict(samples.group_by("modality").len().iter_rows())
    of_llm, of_vision = (frame.filter(module=module) for module in ("llm", "vision"))
    assert dict(of_llm.select("modality", "num_samples").iter_rows()) == counts
    assert set(of_vision["modality"]) == counts.keys() - {"text"}
    for row in frame.iter_rows(named=True):
        assert 1 <= row["num_measured"] <= min(2, row["num_samples"])
        assert row["seconds"] > 0
        assert row["num_unreadable"] == 0
    assert (of_llm["media_bytes"] == 0).all()
    assert (of_vision["media_bytes"] > 100).all()
    assert "vision video:" in printed
    assert "MB of media" in printed


def test_damaged_media_are_counted(profiled, demo_data, tmp_path):
    config, shapes = profiled()
    away = tmp_path / "away"
    for file in demo_data.train_manifest.parent.rglob("*"):
        if file.is_file():
            copy = away / file.relative_to(demo_data.train_manifest.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(b"this is no picture any more")
    config["data"]["sources"][0]["media_root"] = str(away)
    printed = dflop("profile-loading", config, "--shapes", shapes, "--out", tmp_path / "loading.parquet")
    of_vision = read_loading_times(tmp_path / "loading.parquet").frame.filter(module="vision")
    assert (of_vision["num_unreadable"] == of_vision["num_measured"]).all()
    assert "of them damaged" in printed


def table(**seconds: tuple[int, float]) -> LoadingTimes:
    """`vision_image=(number of samples, seconds)`; all threads together take twice as long."""
    rows = [
        {
            "module": name.split("_")[0],
            "modality": name.split("_")[1],
            "num_samples": number,
            "num_measured": 1,
            "num_unreadable": 0,
            "seconds": total_s,
            "core_s": 2 * total_s,
            "media_bytes": 0.0,
            "num_cores": 8,
        }
        for name, (number, total_s) in seconds.items()
    ]
    return LoadingTimes(pl.DataFrame(rows, schema=LOADING_SCHEMA))


def test_a_batch_has_each_modality_as_often_as_the_data():
    times = table(vision_image=(30, 0.1), llm_image=(30, 0.002), llm_text=(70, 0.001))
    assert times.of_batch("vision", 10) == pytest.approx((0.3, 0.6))
    assert times.of_batch("llm", 10) == pytest.approx((0.013, 0.026))
    assert times.num_cores == 8


@pytest.mark.parametrize("content", [None, b"", b"PAR1 torn", "another table"])
def test_a_file_that_is_no_measured_loading_is_named_with_what_makes_one(content, tmp_path):
    path = tmp_path / "loading.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        pl.DataFrame({"module": ["llm"]}).write_parquet(path)
    with pytest.raises(UserError, match=r"loading.parquet.*dflop profile-loading"):
        read_loading_times(path)
