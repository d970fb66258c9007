"""A file that cannot be written to its end is named in one line, and nothing of it is left."""

import resource
from collections.abc import Iterator

import numpy as np
import polars as pl
import pytest

from dflop.base import UserError, written_whole
from dflop.store import write_parquet
from dflop.store.database import write_database

TABLE = pl.DataFrame({"noise": np.random.default_rng(0).random(20_000)})


@pytest.fixture(autouse=True)
def no_file_beyond_64_kib() -> Iterator[None]:
    """As on a full disk, a write fails: here with "File too large"."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_text_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(OSError, match="File too large") as caught, written_whole(tmp_path / "a.json") as beside:
        beside.write_bytes(bytes(2**17))
    assert caught.value.filename == str(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_a_table_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(OSError, match="File too large") as caught:
        write_parquet(TABLE, tmp_path / "a.parquet")
    assert caught.value.filename == str(tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())


def test_a_database_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.duckdb cannot be written: .*File too large"):
        write_database(tmp_path / "a.duckdb", "CREATE TABLE noise AS SELECT * FROM frame;\n", {"frame": TABLE}, {})
    assert not list(tmp_path.iterdir())
