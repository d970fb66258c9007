"""Commands that take a run's name instead of its files."""

from pathlib import Path

import click
import pytest

from dflop.base import UserError
from dflop.cli.options import FILE, config_option, run_argument


@pytest.fixture
def given(tmp_path, monkeypatch):
    """`given(*arguments)`: what a command with these arguments is given."""
    monkeypatch.chdir(tmp_path)
    seen = {}

    @click.command("show")
    @config_option
    @click.option("--shapes", type=FILE)
    @click.option("--out", type=FILE)
    @run_argument(shapes="shapes.duckdb", out="table.parquet")
    def show(configs, shapes, out):
        seen.update(configs=configs, shapes=shapes, out=out)

    def run(*arguments: str) -> dict:
        show.main(list(arguments), standalone_mode=False)
        return seen

    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "results" / "mine"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("run: mine\n")
    return path


@pytest.mark.parametrize("name", ["mine", "results/mine"])
def test_a_run_stands_for_its_config_and_files(given, folder, name):
    assert given(name) == {
        "configs": ("results/mine/config.yaml",),
        "shapes": Path("results/mine/shapes.duckdb"),
        "out": Path("results/mine/table.parquet"),
    }


def test_what_is_given_beside_a_run_counts(given, folder):
    seen = given("mine", "--out", "elsewhere.parquet", "--config", "seed=3")
    assert seen["out"] == Path("elsewhere.parquet")
    assert seen["configs"] == ("results/mine/config.yaml", "seed=3")


def test_without_a_run_everything_must_be_given(given):
    assert given("--shapes", "a.duckdb", "--out", "b.parquet")["shapes"] == Path("a.duckdb")
    with pytest.raises(UserError, match=r"needs --out, or a run: its name or folder"):
        given("--shapes", "a.duckdb")


def test_what_is_no_run_is_named(given, tmp_path):
    with pytest.raises(UserError, match=r"there is no run `yours`: neither yours nor results/yours is a folder"):
        given("yours")
    (tmp_path / "results" / "old").mkdir(parents=True)
    with pytest.raises(UserError, match=r"results/old holds no config.yaml"):
        given("old")
