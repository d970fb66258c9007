"""Rows of a comparison that train in turns on two processes: ours, plain PyTorch, a system by its own plan, and
the layout of today."""

import json

import polars as pl
import pytest
import torch
import torch.distributed as dist
from processes import run_command
from torch.nn.parallel import DistributedDataParallel
from training_runs import plan_file

from dflop.checks.side_by_side import OURS_AT_RANDOM, plain
from dflop.comparison import OURS, TODAYS
from dflop.config import load_config
from dflop.plan import Grid, Plan
from dflop.step import make_program
from dflop.train.rank_model import build_rank_model
from dflop.train.topology import place_in_world

pytestmark = pytest.mark.serial

NUM_STEPS = 2
PLAIN = ("DDP", "DDP, accumulated", "DDP, padded", "FSDP2")
SYSTEM = "FSDP, balanced by our sampler"
TODAY = {"llm": {"tp": 1, "pp": 2, "dp": 1}, "num_microbatches": 2}


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory):
    """The table by name of the row, and what was printed."""
    plan = {"schedules": ["1f1b"], "search_batches": 2, "today": TODAY}
    rows = (OURS_AT_RANDOM, *PLAIN, SYSTEM, TODAYS)
    return measure(run, tmp_path_factory.mktemp("measured"), rows, plan=plan)


def measure(run, made, rows, **more):
    (folder, config), out = run, made / "comparison.parquet"
    config = config | {"cluster": {"devices_per_node": 2}} | more
    arguments = ["compare", "--measure", "--config", json.dumps(config), "--shapes", str(folder / "shapes.duckdb")]
    arguments += ["--costs", str(folder / "costs.duckdb"), "--plan", str(plan_file(folder)), "--out", str(out)]
    arguments += ["--steps", str(NUM_STEPS)]
    for name in rows:
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


MODELS = {
    "projector": {"train": ["projector"]},
    "last layer": {"train": ["llm.layers.3", "llm.norm"]},
    "adapters": {"train": ["projector"], "lora": {"targets": ["*.q_proj"]}},
}


@pytest.mark.exhaustive
def test_rows_with_adapters_and_frozen_parts_are_timed(run, tmp_path):
    pytest.importorskip("peft")
    rows, _ = measure(run, tmp_path, ("DDP", "FSDP2"), model=run[1]["model"] | MODELS["adapters"])
    assert all(min(rows[name]["measured_steps_s"]) > 0 for name in (OURS, "DDP", "FSDP2"))


@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_ddp_trains_what_ours_does_and_looks_for_no_unused_parameters(run, name, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    config, cpu, made = load_config(run[1] | {"model": run[1]["model"] | MODELS[name]}), torch.device("cpu"), []

    class Noted(DistributedDataParallel):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            made.append(self)

    monkeypatch.setattr(plain, "DistributedDataParallel", Noted)
    grids = tuple(Grid(module=module, num_ranks=1) for module in ("vision", "llm"))
    plan_of_one = Plan(placement="monolithic", grids=grids, num_microbatches=1)
    program = make_program(plan_of_one, config.model.trained)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        plain.plain_side(config, [], 1, cpu, on_the_fly=False)
        topology = place_in_world(program, cpu, torch.float64, dist.HashStore())
        ours = build_rank_model(config, plan_of_one, topology, torch.float64)
    finally:
        dist.destroy_process_group()
    (ddp,) = made
    assert not ddp.find_unused_parameters
    named = {name for node in ours.nodes for name, own in node.parameters.items() if own.requires_grad}
    theirs = {name.partition(".hf.")[2] for name, own in ddp.module.named_parameters() if own.requires_grad}
    assert {name.replace(".default", "").replace(".base_layer", "") for name in theirs} == named
