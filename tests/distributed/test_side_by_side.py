"""Rows of a comparison that train in turns on two processes: ours, plain PyTorch, a system by its own plan, and
the layout of today."""

import json

import polars as pl
import pytest
from processes import run_command
from training_runs import plan_file

from dflop.checks.side_by_side import OURS_AT_RANDOM
from dflop.comparison import OURS, TODAYS

pytestmark = pytest.mark.serial

NUM_STEPS = 2
PLAIN = ("DDP", "DDP, accumulated", "DDP, padded", "FSDP2")
SYSTEM = "FSDP, balanced by our sampler"
TODAY = {"llm": {"tp": 1, "pp": 2, "dp": 1}, "num_microbatches": 2}


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory):
    """The table by name of the row, and what was printed."""
    folder, config = run
    out = tmp_path_factory.mktemp("measured") / "comparison.parquet"
    plan = {"schedules": ["1f1b"], "search_batches": 2, "today": TODAY}
    config = config | {"cluster": {"devices_per_node": 2}, "plan": plan}
    arguments = ["compare", "--measure", "--config", json.dumps(config), "--shapes", str(folder / "shapes.duckdb")]
    arguments += ["--costs", str(folder / "costs.duckdb"), "--plan", str(plan_file(folder)), "--out", str(out)]
    arguments += ["--steps", str(NUM_STEPS)]
    for name in (OURS_AT_RANDOM, *PLAIN, SYSTEM, TODAYS):
        arguments += ["--row", name]
    code = run_command(arguments, out.parent / "log")
    log = (out.parent / "log").read_text()
    assert code == 0, log
    table = pl.read_parquet(out.with_name("comparison-measured.parquet"))
    return {row["name"]: row for row in table.to_dicts()}, log


def test_every_chosen_row_is_timed_in_every_counted_step(measured):
    rows, log = measured
    assert set(rows) == {OURS, OURS_AT_RANDOM, SYSTEM, TODAYS, *PLAIN}
    for name, row in rows.items():
        assert len(row["measured_steps_s"]) == NUM_STEPS, name
        assert min(row["measured_steps_s"]) > 0
        assert name in log
    assert rows[OURS]["measured_over_ours"] == 1.0


def test_rows_of_plans_have_their_prediction_beside_the_clock_and_plain_ones_have_none(measured):
    rows, _ = measured
    for name in (OURS, OURS_AT_RANDOM, SYSTEM, TODAYS):
        row = rows[name]
        assert len(row["steps_s"]) == NUM_STEPS
        ratios = [real / said for real, said in zip(row["measured_steps_s"], row["steps_s"], strict=True)]
        assert min(ratios) <= row["measured_over_predicted"] <= max(ratios)
    assert rows[OURS]["plan"] == rows[OURS_AT_RANDOM]["plan"] != rows[SYSTEM]["plan"]
    assert "llm tp1 pp2 dp1, 2 microbatches" in rows[TODAYS]["plan"]
    assert all(rows[name]["measured_over_predicted"] is None for name in PLAIN)
