"""What a user may hand to scheduling by mistake: one line that names it and the way out, or a run that goes on."""

import json
import re
import sys

import duckdb
import numpy as np
import polars as pl
import pytest
import yaml

from dflop.cli import main
from dflop.config import load_config
from dflop.schedule.service import open_scheduler
from dflop.store import LEFT_OUT_SCHEMA


@pytest.fixture
def schedule(monkeypatch, capsys):
    """`schedule(run, **config)`: the exit code of `dflop schedule`, and all that it said."""

    def run_it(run, **config):
        command = ["dflop", "schedule", "--config", json.dumps(run.config), "--config", json.dumps(config)]
        for name, path in (run.paths | {"out": run.paths["plan"].with_name("schedule.parquet")}).items():
            command += [f"--{name}", str(path)]
        monkeypatch.setattr(sys, "argv", [*command, "--batches", "2"])
        code = 0
        try:
            main()
        except SystemExit as leave:
            code = leave.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return run_it


def change(path, statement, *values):
    with duckdb.connect(str(path)) as connection:
        connection.execute(statement, values)


def assert_one_line(said, pattern):
    code, output = said
    assert code == 2, output
    (line,) = output.strip().splitlines()
    assert re.search(pattern, line), line


def test_a_freak_sample_is_named_written_down_and_the_preview_goes_on_without_it(schedule, make_run):
    run = make_run()
    change(run.paths["shapes"], "UPDATE samples SET llm_tokens = 3000000 WHERE sample_id = 's7'")
    code, output = schedule(run)
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if "left out" in line]
    assert "left out: drawn row 7: sample 's7' with 3000000 LLM tokens" in line
    assert "GiB of a device even alone in a microbatch" in line
    assert "`cluster.memory_gib` is 4; use devices with as much, more replicas a sample (`plan.cp_sizes`)" in line
    folder = run.paths["plan"].parent
    rejects = pl.read_parquet(folder / "schedule_rejects.parquet")
    assert rejects.schema == LEFT_OUT_SCHEMA
    assert rejects["sample_id"].to_list() == ["s7"]
    with open_scheduler(load_config(run.config), **run.paths).open() as scheduler:
        assert scheduler.left_out.equals(rejects)
        # 59 samples are left: an epoch of them is each of these once, and the giant never.
        epoch = [index for step in range(59) for index in scheduler.batches[step].tolist()]
        assert sorted(epoch[:59]) == list(range(59))
        assert "s7" not in scheduler.samples.sample_id


def test_without_a_freak_the_table_of_those_left_out_is_empty(schedule, make_run):
    run = make_run()
    code, output = schedule(run)
    assert (code, "left out" in output) == (0, False)
    assert pl.read_parquet(run.paths["plan"].with_name("schedule_rejects.parquet")).is_empty()


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        *(("time_model", column, value) for column in ("const_s", "per_token_s") for value in (np.nan, -1.0, 1e9)),
        *(
            ("memory_model", column, value)
            for column in ("const_bytes", "per_token_bytes")
            for value in (np.nan, -1e19)
        ),
        ("memory_model", "parameter_bytes", -1.0),
        ("device", "overhead_bytes", -1.0),
        ("device", "update_bytes_per_s", 0.0),
    ],
)
def test_numbers_of_the_cost_tables_that_cannot_be_true(schedule, make_run, table, column, value):
    run = make_run()
    change(run.paths["costs"], f"UPDATE {table} SET {column} = ?", value)
    where = f", column {column}" if table == "device" else r", \w+ tp=1, part \w+"
    assert_one_line(
        schedule(run), rf"costs\.duckdb, table {table}{where}: \S+ cannot be true, .* `dflop profile-costs`"
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [(100.0, r"\S+e\+\d+ s"), (0.0, "0 s")],
    ids=["absurd", "zero"],
)
def test_costs_by_which_no_sample_can_take_so_long_name_the_sample(schedule, make_run, value, said):
    run = make_run()
    change(
        run.paths["costs"],
        "UPDATE time_model SET per_token_s = ?, per_sum_sq_token_s = 0, per_target_s = 0, hinge_at = [], hinge_s = [] "
        "WHERE module = 'llm'",
        value,
    )
    assert_one_line(
        schedule(run),
        rf"the costs say that sample 's\d+' .* takes a stage of llm {said}, which must be .* `dflop profile-costs`",
    )


def test_fewer_samples_than_buckets(schedule, make_run):
    assert_one_line(
        schedule(make_run(), train={"global_batch_size": 7}),
        r"plan\.yaml: 8 microbatches .* by a batch of 7 samples, .* `plan.num_microbatches` to at most 7",
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda grids: {"visoin": grids["vision"], "llm": grids["llm"]},
            r"`plan\.grids\.visoin` is of no module of .*; did you mean `plan.grids.vision`\? it has vision, llm",
        ),
        (
            lambda grids: {"llm": grids["llm"] | {"rank_offset": 0}},
            r"`plan\.grids` has no vision, which .* has; make the plan again with `dflop plan`",
        ),
        (
            lambda grids: {**grids, "llm": {**grids["llm"], "layers": [1, 99]}},
            r"plan\.yaml: llm: the plan's layers \[1, 99\] are 100 together, the model has \d+",
        ),
        (
            lambda grids: {**grids, "llm": {**grids["llm"], "recomputed": [0] * (grids["llm"]["pp"] - 1) + [99]}},
            r"plan\.yaml: `plan\.grids\.llm\.recomputed\[\d\]` is 99; the stage has \d+ layers?: use at most \d",
        ),
    ],
)
def test_a_plan_with_other_modules_or_layers_than_the_model(schedule, make_run, change, said):
    run = make_run()
    written = yaml.safe_load(run.paths["plan"].read_text())
    written["plan"] |= {"checkpointing": True, "grids": change(written["plan"]["grids"])}
    run.paths["plan"].write_text(yaml.safe_dump(written, sort_keys=False))
    assert_one_line(schedule(run), said)


def test_fewer_samples_than_a_batch(schedule, make_run):
    assert_one_line(
        schedule(make_run(), train={"global_batch_size": 61}),
        r"`train\.global_batch_size` is 61, but there are only 60 samples; lower it to 60 or add data",
    )


def test_a_plan_for_other_devices(schedule, make_run):
    assert_one_line(
        schedule(make_run(), cluster={"devices_per_node": 2}),
        r"the plan needs 3 devices, `cluster` has 2 \(1 x 2\); run `dflop plan` again for this cluster",
    )


def test_a_plan_that_shards_as_no_costs_were_measured(schedule, make_run):
    run = make_run()
    values = yaml.safe_load(run.paths["plan"].read_text())
    values["plan"]["grids"]["llm"]["tp"], values["plan"]["grids"]["llm"]["pp"] = 2, 1
    run.paths["plan"].write_text(yaml.safe_dump(values))
    assert_one_line(schedule(run), r"no measured costs for llm tp=2 .* add 2 to `costs\.tp_sizes`")


def test_devices_that_cannot_hold_the_model(schedule, make_run):
    assert_one_line(
        schedule(make_run(), cluster={"memory_gib": 0.001}),
        r"the parameters, gradients and optimiser state of vision take .* GiB .* `cluster\.memory_gib` is 0\.001; use",
    )


def test_without_a_cbc_library_ilp_goes_on_by_search_and_says_so(schedule, make_run, monkeypatch, tmp_path):
    monkeypatch.setenv("PMIP_CBC_LIBRARY", str(tmp_path / "libCbc.so"))
    run = make_run(llm_pp=1, num_microbatches=20, batch_size=40, alike=True, policy="ilp")
    code, output = schedule(run)
    assert code == 0, output
    with open_scheduler(load_config(run.config), **run.paths).open() as scheduler:
        statuses = [scheduler.schedule(step).status for step in range(3)]
        assert any("ilp unavailable, search" in status for status in statuses), statuses
