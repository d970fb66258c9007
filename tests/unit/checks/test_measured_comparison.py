"""Measured comparisons: the systems that can be carried out, their measured times as a table, and what is refused."""

import pytest
from click.testing import CliRunner

from dflop.base import UserError
from dflop.checks.side_by_side import Clocked, contenders, measured_frame, measured_text
from dflop.cli import cli
from dflop.comparison import OURS, TODAYS, SystemRow, systems_of
from dflop.config import load_config
from dflop.search import search_plans

# Of four devices; what is left open is as most frameworks do it.
TODAY = {"llm": {"tp": 1, "pp": 2, "dp": 2}, "num_microbatches": 4}


def make_config(today: dict | None = None, devices: int = 4):
    return load_config(
        {
            "cluster": {"devices_per_node": devices, "memory_gib": 64.0},
            "train": {"global_batch_size": 16},
            "plan": {"schedules": ["1f1b"], "search_batches": 3, "today": today},
        }
    )


def test_the_layout_of_today_can_be_carried_out_or_says_why_not(costs, tiny_spec, draw_samples):
    samples, config = draw_samples(96, seed=3), make_config(TODAY)
    inputs, systems = (config, tiny_spec, costs, samples), systems_of(config)[:1]
    plan = search_plans(make_config(), *inputs[1:]).best.plan
    *_, todays = contenders(*inputs, plan, systems=systems, num_steps=2, counted=range(1, 2))
    assert todays.name == TODAYS
    assert todays.plan.grid("llm").pp == 2
    assert len(todays.schedules) == 2
    two = search_plans(make_config(devices=2), *inputs[1:]).best.plan
    *_, todays = contenders(*inputs, two, systems=systems, num_steps=2, counted=range(1, 2))
    assert todays.row.why_not == "its plan has 4 ranks, and ours 2"


def test_what_was_measured_stands_beside_predictions_and_what_was_not_says_why():
    rows = [
        SystemRow(name=OURS, plan="p", step_s=1.0, steps_s=[1.0, 1.0, 1.0]),
        SystemRow(name="plain"),
        SystemRow(name="large", why_not="its plan has 4 ranks, and ours 2"),
    ]
    clocked = {OURS: Clocked([1.0, 2.0, 4.0], [0.5, 0.5, 0.5]), "plain": Clocked([2.0, 2.0, 8.0], [1.0, 1.0, 1.0])}
    by_name = {row["name"]: row for row in measured_frame(rows, clocked).to_dicts()}
    assert by_name["plain"]["measured_over_ours"] == 2.0  # of 2, 1 and 2, step by step
    assert by_name[OURS]["measured_over_predicted"] == 2.0
    assert by_name["plain"]["measured_over_predicted"] is None
    assert by_name["large"]["measured_s"] is None
    assert "unmeasured: its plan has 4 ranks, and ours 2" in measured_text(rows, clocked)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ablate"], "leave out --ablate and --scale"),
        (["--row", "nobody"], "there is no row 'nobody'; --row takes"),
        (["--row", "today's layout, random"], r"the config has no `plan\.today`"),
        (["--config", "cluster.num_nodes=2"], "on the devices of one node"),
    ],
)
def test_what_cannot_be_measured_is_one_line(options, said, tmp_path):
    files = ["--shapes", "s.duckdb", "--costs", "c.duckdb", "--out", str(tmp_path / "o.parquet")]
    base = ["--config", "config/config.yaml", "--measure"]
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(cli, ["compare", *files, *base, *options], catch_exceptions=False, standalone_mode=False)


def test_a_run_is_measured_by_the_plan_in_its_folder(tmp_path):
    (tmp_path / "config.yaml").write_text("run: mine")
    with pytest.raises(UserError, match=str(tmp_path / "plan.yaml")):
        CliRunner().invoke(cli, ["compare", str(tmp_path), "--measure"], catch_exceptions=False, standalone_mode=False)
