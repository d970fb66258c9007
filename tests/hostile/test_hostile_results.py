"""Results that were damaged on their way: a table is read as it was written, or refused in one line."""

import contextlib
import json
import random
import re
import sqlite3
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import duckdb
import polars as pl
import pytest
import reported_runs
import yaml
from fuzzing import damaged, fuzz

from dflop.base import UserError
from dflop.checks.step_logs import read_batches, read_log
from dflop.checks.verdict import judge
from dflop.cli import main
from dflop.costs import CostModel
from dflop.plan import Grid, Plan, load_plan, read_plan_file
from dflop.search import read_baselines
from dflop.store import read_parquet, read_table, write_parquet
from dflop.store.database import write_database

TABLE = pl.DataFrame(
    {
        "name": ["a", None, "é" * 40],
        "seconds": [0.1, 2.5, float("inf")],
        "layers": [[1, 2], [], None],
        "is_so": [True] * 3,
    }
)
PLAN = Plan(
    placement="disjoint",
    grids=(Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=2, rank_offset=1)),
    num_microbatches=2,
)


def flipped(content: bytes, rng: random.Random) -> bytes:
    """A copy with one to three bits flipped anywhere, as a disk or a network leaves it."""
    copy = bytearray(content)
    for _ in range(rng.choice((1, 1, 3))):
        copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
    return bytes(copy)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.parquet"
    write_parquet(TABLE, path)
    return path.read_bytes()


def test_hardly_a_bit_that_flips_in_a_table_makes_another_table(table, tmp_path):
    """Without checksums about a third of such files are read as other numbers. Heads of pages have none."""
    refused, others = count(), []

    def read(path):
        try:
            frame = read_parquet(path, made_by="plan")
        except UserError:
            next(refused)
        else:
            if not frame.equals(TABLE) or frame.schema != TABLE.schema:
                others.append(path)

    fuzz({"table.parquet": table}, read, (), tmp_path, damage=flipped)
    num_refused = next(refused)
    assert num_refused > 100
    assert len(others) <= num_refused / 100


def test_a_table_with_bytes_lost_or_changed_is_refused(table, tmp_path):
    fuzz({"table.parquet": table}, lambda path: read_parquet(path, made_by="plan"), UserError, tmp_path)


def test_a_damaged_database_is_refused_or_read(write_made_up_costs, tmp_path):
    whole = tmp_path / "whole.duckdb"
    write_made_up_costs(whole)
    good = {"costs.duckdb": whole.read_bytes()}
    for damage in (flipped, damaged):
        fuzz(good, CostModel.load, UserError, tmp_path, num_files=15, damage=damage)


def test_a_view_of_a_database_from_elsewhere_reads_no_other_file(tmp_path):
    (tmp_path / "secret.csv").write_text("word\nhush\n")
    path = tmp_path / "costs.duckdb"
    write_database(path, "SELECT 1;\n", {}, {})
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"CREATE VIEW device AS SELECT * FROM read_csv('{tmp_path}/secret.csv')")
        assert connection.execute("FROM device").fetchall() == [("hush",)]
    with pytest.raises(UserError, match=r"costs\.duckdb is not a dflop database, .*disabled") as refused:
        read_table(path, "device", made_by="fit-costs")
    assert "hush" not in str(refused.value)


def test_for_a_database_of_sqlite_no_program_is_fetched_from_the_internet(tmp_path):
    path = tmp_path / "costs.duckdb"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE meta (key, value)")
    with pytest.raises(UserError, match=r"costs\.duckdb is not a dflop database, .*it is no file of DuckDB"):
        read_table(path, "device", made_by="fit-costs")


def test_a_damaged_plan_is_refused_or_read(tmp_path):
    predicted = {"step_s": 0.5, "idle": 0.1, "memory_bytes": {"vision": 2e8, "llm": 6e8}, "bottleneck": "llm compute"}
    sections = {
        "plan": PLAN.to_dict(),
        "predicted": predicted,
        "why": "It is short.",
        "loading": {"processes": 2},
        "with_more_memory": {"plan": PLAN.to_dict(), "predicted": predicted},
        "baselines": [
            {"name": "a", "why_not": "it does not fit"},
            {
                "name": "b",
                "step_s": 0.7,
                "would_take": "1.4x as long",
                "idle": 0.3,
                "plan": "b",
                "over_batches": [1.1, 2.0],
            },
        ],
    }

    def read(path):
        load_plan(path)
        read_baselines(path)
        said = read_plan_file(path)
        for part in (said, said.get("with_more_memory", {})):
            if "predicted" in part:  # what the report computes from it
                assert isinstance(max(part["predicted"]["memory_bytes"].values()) * part["predicted"]["step_s"], float)

    good = {"plan.yaml": yaml.safe_dump(sections, sort_keys=False).encode()}
    for damage in (flipped, damaged):
        fuzz(good, read, UserError, tmp_path, num_files=40, damage=damage)


DATA = ["--shapes", "shapes.duckdb", "--costs", "costs.duckdb"]
COMMANDS = {
    "plot-shapes": [*DATA[:2], "--out", "shapes.svg"],
    "plan": DATA,
    "plan --loading": [*DATA, "--loading", "loading.parquet"],
    "fit-costs": ["llm.parquet", "--out", "again.duckdb"],
    "compare": [*DATA, "--out", "compared.parquet"],
    "schedule": [*DATA, "--plan", "plan.yaml", "--out", "again.parquet"],
    "train": [*DATA, "--plan", "plan.yaml", "--out", "again"],
    "report": ["--run", ".", "--out", "report"],
}
READERS = {
    "shapes.duckdb": ["plot-shapes", "plan", "compare", "schedule", "train", "report"],
    "costs.duckdb": ["plan", "compare", "schedule", "train", "report"],
    "plan.yaml": ["schedule", "train", "report"],
    "loading.parquet": ["plan --loading"],
    "llm.parquet": ["fit-costs"],
    **{f"{table}.parquet": ["report"] for table in ("candidates", "schedule")},
    **{f"train/{file}": ["report"] for file in ("observations.duckdb", "metrics.jsonl", "summary.json")},
}
DAMAGES = {
    "empty": lambda path: b"",
    "cut off": lambda path: path.read_bytes()[: path.stat().st_size // 4 + 3],
    "flipped": lambda path: bytes(byte ^ 0x80 if at % 500 == 9 else byte for at, byte in enumerate(path.read_bytes())),
    "no such kind of file": lambda path: b"\x89PNG\r\n\x1a\n" + bytes(1000),
    "another table": lambda path: next(
        other for other in sorted(path.parent.glob(f"*{path.suffix}")) if other != path
    ).read_bytes(),
}


@pytest.fixture(scope="module")
def reported(write_made_up_costs, tmp_path_factory) -> Path:
    """The folder of a run that was trained, with the tables as the commands write them."""
    folder = reported_runs.make_run(tmp_path_factory.mktemp("run"), write_made_up_costs)
    for path in [*folder.glob("[cs]*.parquet")]:
        write_parquet(pl.read_parquet(path), path)
    for name in ("loading", "llm"):  # that what is damaged was another table does not matter
        write_parquet(TABLE, folder / f"{name}.parquet")
    (folder / "train/other.duckdb").write_bytes((folder / "costs.duckdb").read_bytes())
    (folder / "other.yaml").write_text("run: a\n")
    (folder / "train/other.json").write_text("[1, 2]")
    (folder / "train/other.jsonl").write_text('{"id": "a"}\n')
    return folder


@pytest.fixture
def damage(reported) -> Iterator:
    """`damage(file, how)` damages a file of the run, which is whole again after the test."""
    whole = {}

    def spoil(name: str, how: str) -> None:
        path = reported / name
        whole[path] = path.read_bytes()
        path.write_bytes(DAMAGES[how](path))

    yield spoil
    for path, content in whole.items():
        path.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(("name", "command"), [(name, command) for name in READERS for command in READERS[name]])
def test_each_command_refuses_a_damaged_file_of_a_run_in_a_line_that_says_what_makes_it_again(
    reported, damage, name, command, how, monkeypatch, capfd
):
    damage(name, how)
    monkeypatch.chdir(reported)
    config = {"cluster": {"devices_per_node": 2}, "schedule": {"policy": "lpt"}, "train": {"global_batch_size": 16}}
    config |= {"data": {"sources": [{"path": "train.json"}]}}
    given = [] if command in ("plot-shapes", "fit-costs") else ["--config", json.dumps(config)]
    monkeypatch.setattr(sys, "argv", ["dflop", command.split()[0], *given, *COMMANDS[command]])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr().err
    assert ended.value.code == 2
    assert re.fullmatch(rf"dflop: {re.escape(name)}\b[^\n]*`dflop [a-z-]+`[^\n]*\n", said), said


def test_damaged_logs_of_other_trainers_are_read_or_refused(tmp_path):
    span = {"ph": "X", "ts": 1.5, "dur": 900, "name": "ProfilerStep#3", "cat": "user_annotation"}
    kernel = span | {"name": "nccl", "cat": "kernel", "ts": 2}
    titan = {"rank": 0, "step": 1, "log_type_name": "step_end", "value": 12.5}
    tokens = titan | {"log_type_name": "metric_value", "event_name": "local_valid_tokens"}
    lines = {
        "titan.jsonl": [titan, tokens, titan | {"rank": 1}, tokens | {"rank": 1}],
        "training.jsonl": [
            {"step": step, "tps": 10.0 + step, "num_tokens_per_step": 9 * step + 1} for step in range(25)
        ],
        "steps.jsonl": [{"step": step, "rank": 0, "step_s": 1.5, "data_s": 0.1, "num_tokens": 7} for step in range(9)],
    }
    good = {name: "\n".join(map(json.dumps, rows)).encode() for name, rows in lines.items()}
    good |= {
        "trace.json": json.dumps({"traceEvents": [span, kernel]}).encode(),
        "steps.csv": b"step,step_s,num_tokens\n" + b"".join(b"%d,1.%d,%d\n" % (n, n, n * n) for n in range(24)),
    }

    def read(path: Path) -> None:
        judge(read_log([path]))
        with contextlib.suppress(UserError):
            judge(read_log([path]), read_batches(path))

    fuzz(good, read, UserError, tmp_path)
