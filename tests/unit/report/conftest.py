"""Runs that were reported on: a usual one, and an odd one."""

import json

import polars as pl
import pytest
from reported_runs import SMALL, WIDE, make_run, report_of


@pytest.fixture(scope="session")
def usual(write_made_up_costs, tmp_path_factory):
    """A small run of pictures, clips and text, three of whose records were rejected."""
    folder = make_run(tmp_path_factory.mktemp("usual"), write_made_up_costs, num_rejects=3)
    return report_of(folder, SMALL)


@pytest.fixture(scope="session")
def odd(write_made_up_costs, tmp_path_factory):
    """Text alone, eight ranks, three steps that the trainer foresaw otherwise, and no column beyond the contract."""
    folder = make_run(
        tmp_path_factory.mktemp("odd"),
        write_made_up_costs,
        plan=WIDE,
        modalities=("text",),
        num_steps=3,
        predicted_in_training=1.3,
    )
    for name, column in (("schedule", "encoder_rank"), ("candidates", "num_batches")):
        frame = pl.read_parquet(folder / f"{name}.parquet")
        frame.drop(column).write_parquet(folder / f"{name}.parquet")
    lines = [json.loads(line) for line in (folder / "train/metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key not in ("predicted_idle", "policy")} for line in lines]
    (folder / "train/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    return report_of(folder, WIDE)
