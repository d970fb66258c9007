"""A family is added by adding its folder: a made-up one, with two encoders, goes from shapes and made-up costs to a
plan and schedules.

The folder is written as README.md of `dflop/models` says and put on the package's path; no other file changes.
"""

import json
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner
from made_up_family import NAMES

from dflop.cli import cli
from dflop.config import ModelConfig
from dflop.models import family_names, load_model_spec
from dflop.plan import load_plan
from dflop.shapes import load_samples
from dflop.store import read_table


def run(*arguments: object) -> str:
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.exception
    return done.stdout


def write_shapes(config: dict, folder: Path) -> Path:
    shards = [line.split("\t")[0] for line in run("list-shards", "--config", json.dumps(config)).splitlines()]
    for shard in shards:
        out = folder / "shapes" / f"{shard}.parquet"
        run("profile-shapes", "--config", json.dumps(config), "--shard", shard, "--out", out, "--workers", 1)
    path = folder / "shapes.duckdb"
    run("merge-shapes", "--config", json.dumps(config), "--shapes", folder / "shapes", "--out", path)
    return path


@pytest.fixture
def config(made_up, demo_data) -> dict:
    manifests = [demo_data.train_manifest, demo_data.audio_manifest]
    return {
        "data": {"sources": [{"path": str(path), "media_root": str(path.parent)} for path in manifests]},
        "model": {"family": made_up},
        "cluster": {"device": "cuda", "device_model": "h100-80g", "devices_per_node": 4},
        "plan": {"search_batches": 2},
        "schedule": {"policy": "lpt"},
        "train": {"precision": "bf16", "global_batch_size": 8},
    }


def test_a_new_folder_is_a_family_with_shapes_of_all_its_modules(made_up, config, in_tmp_path):
    assert made_up in family_names()
    spec = load_model_spec(ModelConfig(family=made_up))
    names = [module.name for module in spec.modules]
    assert names == NAMES

    shapes = write_shapes(config, in_tmp_path)
    table = read_table(shapes, "samples", made_by="merge-shapes")
    pictures = table.filter(modality="image")
    assert (pictures["num_items"] == 4).all()
    assert (pictures["vision_tokens"] == 36).all()
    samples, left_out = load_samples(shapes, spec.encoders)
    assert not left_out
    assert len(samples) == len(table)
    assert samples.encoders == ("vision", "audio")
    assert (samples.num_items.sum(axis=0) > 0).all()

    measured = json.dumps({"model": {"family": made_up}})
    refused = CliRunner().invoke(cli, ["profile-costs", "--config", measured, "--module", "llm", "--out", "x.parquet"])
    assert "`model.family` is 'made_up', which cannot be measured or trained yet" in str(refused.exception)


def test_it_is_planned_for_and_scheduled_and_files_have_columns_of_all_its_modules(
    config, in_tmp_path, write_made_up_costs
):
    shapes, costs = write_shapes(config, in_tmp_path), in_tmp_path / "costs.duckdb"
    write_made_up_costs(costs, modules=tuple(NAMES))
    files = ["--config", json.dumps(config), "--shapes", shapes, "--costs", costs]
    plan_file, candidates_file = in_tmp_path / "plan.yaml", in_tmp_path / "candidates.parquet"
    run("plan", *files, "--out", plan_file, "--candidates", candidates_file)
    candidates = pl.read_parquet(candidates_file)
    for name in NAMES:
        assert {f"{name}_tp", f"{name}_pp", f"{name}_dp", f"{name}_memory_bytes"} <= set(candidates.columns)
    plan, best = load_plan(plan_file), candidates.row(0, named=True)
    assert [grid.module for grid in plan.grids] == NAMES
    assert best["step_s"] == candidates["step_s"].min()
    assert [(grid.tp, grid.pp, grid.dp) for grid in plan.grids] == [
        tuple(best[f"{name}_{size}"] for size in ("tp", "pp", "dp")) for name in NAMES
    ]
    assert plan.world_size == 4

    out = in_tmp_path / "schedule.parquet"
    run("schedule", *files, "--plan", plan_file, "--batches", 6, "--out", out)
    schedule, stages = pl.read_parquet(out), pl.read_parquet(out.with_name("schedule_stages.parquet"))
    for name in ("encoder_rank", "audio_rank", "llm_dp_rank"):
        module = {"encoder_rank": "vision", "audio_rank": "audio", "llm_dp_rank": "llm"}[name]
        assert schedule[name].is_between(0, plan.grid(module).dp - 1).all()
        own = stages.filter(module=module)
        assert set(own["dp_rank"]) == set(range(plan.grid(module).dp))
        assert own["forward_s"].sum() > 0
        assert own["backward_s"].sum() > 0
