"""The workflow as a user runs it: a small dataset from manifest to report, then what a change reruns.

One whole run is shared by the tests, in a copy of the repository; Snakemake, torchrun and CBC are real.
"""

import json
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from small_data import make_small_data

from dflop.config import load_config
from dflop.plan import load_plan
from dflop.step import nodes_of
from dflop.store import MODALITIES, REJECT_REASONS, read_meta, read_table

pytestmark = pytest.mark.serial

REPOSITORY = Path(__file__).parents[2]


# Real pictures and a clip are among the data where they lie beside the checkout.
REAL = REPOSITORY.parent / "shared/data/demo/demo_llava.json"
SOURCES = ["data/train.json", "data/audio.json", *([str(REAL)] if REAL.is_file() else [])]
SMALL = {
    "run": "small",
    "data": {"sources": [{"path": path} for path in SOURCES], "samples_per_shard": 60},
    "costs": {"repeats": 1, "time_budget_s": 0.5},
    "plan": {"search_batches": 2, "fixed": {"num_microbatches": 4, "placement": "colocated"}},
    "schedule": {"time_limit_s": 0.1},
    "train": {"global_batch_size": 8, "steps": 4, "checkpoint_every": 2, "loader_workers": 0},
}
CACHED = ("--cache", "profile_costs", "--")


@pytest.fixture(scope="module")
def finished(make_checkout):
    """A checkout with a finished run named `small`, and the name of its config file."""
    checkout = make_checkout()
    data = checkout.folder / "data"
    make_small_data(data, num_records=40)
    records = json.loads((data / "train.json").read_text())
    records[3] |= {"image": "images/nowhere.png", "conversations": _conversation("<image>\nWhat is it?", "A dog.")}
    records[3].pop("video", None)
    records.append({"id": "no-turns", "conversations": []})
    (data / "train.json").write_text(json.dumps(records))
    config = checkout.write_config("small.yaml", **SMALL)
    done = checkout.snakemake("--cores", "2", "--configfile", config, *CACHED, "all")
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout, config


def _steps(folder: Path) -> list[dict]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "train/metrics.jsonl").read_text().splitlines()]


def _conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def test_shapes_hold_every_record_once_in_the_promised_columns(finished):
    checkout, _ = finished
    path = checkout.folder / "results/small/shapes.duckdb"
    samples, rejects = (
        read_table(path, table, made_by="").filter(pl.col("source") != "demo_llava") for table in ("samples", "rejects")
    )
    assert samples.columns[:14] == [
        *("sample_id", "source", "row", "shard", "modality", "num_images", "num_frames", "audio_s", "num_items"),
        *("vision_tokens", "audio_tokens", "text_tokens", "llm_tokens", "truncated"),
    ]
    assert rejects.columns == ["source", "row", "sample_id", "reason", "detail"]
    assert rejects.select("reason", "sample_id").sort("reason").rows()[0] == ("empty", "no-turns")
    assert rejects.filter(pl.col("row") == 3)["reason"].to_list() == ["missing_media"]
    assert (len(samples), len(rejects)) == (39, 2)
    assert set(samples["modality"]) <= set(MODALITIES)
    assert set(rejects["reason"]) <= set(REJECT_REASONS)
    summary = read_table(path, "shape_summary", made_by="")
    assert {"source", "modality", "quantity", "p5", "p50", "p95", "p99", "max"} <= set(summary.columns)
    assert {"schema_version", "dflop_version", "config_digest", "created"} <= set(read_meta(path, made_by=""))


def test_costs_hold_measurements_and_the_models_fitted_to_them(finished):
    path = finished[0].folder / "results/small/costs.duckdb"
    measurements = read_table(path, "measurements", made_by="")
    assert {
        *("module", "tp", "num_layers", "num_items", "num_tokens", "sum_sq_tokens"),
        *("pass", "seconds", "peak_bytes", "repeat"),
    } <= set(measurements.columns)
    assert set(measurements["module"]) == {"vision", "llm"}
    assert set(measurements["pass"]) == {"forward", "backward"}
    for table in ("time_model", "memory_model", "fit_error", "device"):
        assert len(read_table(path, table, made_by="")), table
    link_model = read_table(path, "link_model", made_by="")
    assert link_model.select("kind", "scope", "num_ranks").rows() == [
        ("host", "intra", 2),
        ("p2p", "intra", 2),
        ("exchange", "intra", 2),
        ("gradient_sync", "intra", 2),
    ]
    assert link_model["num_points"].sum() == len(read_table(path, "links", made_by=""))  # one repeat each


def test_the_plan_is_the_best_of_the_candidates(finished):
    folder = finished[0].folder / "results/small"
    candidates = pl.read_parquet(folder / "candidates.parquet")
    assert candidates.columns[:16] == [
        *("rank", "placement", "vision_tp", "vision_pp", "vision_dp", "llm_tp", "llm_pp", "llm_dp"),
        *("num_microbatches", "checkpointing", "schedule", "step_s", "idle"),
        *("vision_memory_bytes", "llm_memory_bytes", "bottleneck"),
    ]
    assert candidates["step_s"].is_sorted()
    chosen = yaml.safe_load((folder / "plan.yaml").read_text())
    # Of plans within three percent, the one whose batches take least once they are scheduled.
    (place,) = np.flatnonzero(np.isclose(candidates["step_s"], chosen["predicted"]["step_s"], rtol=1e-5))[:1]
    assert candidates["step_s"][int(place)] <= 1.03 * candidates["step_s"][0]
    assert chosen["plan"]["num_microbatches"] == candidates["num_microbatches"][int(place)] == 4
    others = {own["name"]: own["would_take"] for own in chosen["baselines"]}
    assert len(others) == 5
    for name, read in (("train", lambda summary: summary), ("report", lambda summary: summary["plan"])):
        assert read(json.loads((folder / name / "summary.json").read_text()))["baselines"] == others


def test_the_preview_places_each_sample_of_a_batch_once_and_each_share_of_one(finished):
    folder = finished[0].folder / "results/small"
    schedule = pl.read_parquet(folder / "schedule.parquet")
    assert schedule.columns[:7] == [
        *("step", "sample_id", "llm_dp_rank", "microbatch", "position", "num_items", "llm_tokens"),
    ]
    firsts = schedule.filter(pl.col("share") == 0)
    assert set(firsts.group_by("step").len()["len"]) == {8}
    # Of the batches that lie over the end of an epoch, one may hold a sample twice.
    num_whole = len(read_table(folder / "shapes.duckdb", "samples", made_by="")) // 8
    assert firsts.filter(pl.col("step") < num_whole).select("step", "sample_id").is_unique().all()
    num_shares = pl.col("degree").filter(pl.col("share") == 0).sum()
    of_samples = schedule.group_by("step", "sample_id").agg(pl.len(), num_shares)
    assert (of_samples["len"] == of_samples["degree"]).all()  # one row for each share of it
    cells = schedule.select("step", "llm_dp_rank", "microbatch", "position")
    assert cells.is_unique().all()
    stages = pl.read_parquet(folder / "schedule_stages.parquet")
    assert stages.columns == [
        *("step", "module", "dp_rank", "pp_stage", "microbatch", "forward_s", "backward_s", "extrapolated"),
    ]


def test_training_leaves_metrics_observations_a_trace_a_checkpoint_and_a_model(finished):
    folder = finished[0].folder / "results/small/train"
    steps = _steps(folder.parent)
    assert [step["step"] for step in steps] == list(range(4))
    promised = {"step", "loss", "num_samples", "num_tokens", "step_s", "predicted_step_s", "idle", "wait_s"}
    assert promised <= set(steps[0])
    observations = read_table(folder / "observations.duckdb", "observations", made_by="")
    num_nodes = len(nodes_of(load_plan(folder.parent / "plan.yaml")))
    assert len(observations.filter(pl.col("pass") == "forward")) == 4 * 4 * num_nodes  # of each microbatch in each step
    assert len(read_table(folder / "observations.duckdb", "measured_over_predicted", made_by=""))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"C", "M", "X"}
    assert (folder / "checkpoints/step-000004/run.json").is_file()
    assert (folder / "model/config.json").is_file()
    assert json.loads((folder / "summary.json").read_text())["num_steps"] == 4


def test_a_run_leaves_its_config_and_its_name_stands_for_its_files(finished):
    checkout, _ = finished
    config = load_config(str(checkout.folder / "results/small/config.yaml"))
    assert (config.run, config.train.steps, config.plan.fixed.num_microbatches) == ("small", 4, 4)
    said = checkout.run("dflop", "compare", "small", "--batches", "1")
    assert said.returncode == 0, said.stderr
    assert "\nMegatron-style, random" in said.stdout
    table = pl.read_parquet(checkout.folder / "results/small/comparison.parquet")
    assert table["name"].to_list()[-1] == "dflop"
    assert (checkout.folder / "results/small/comparison.svg").read_text().lstrip().startswith("<?xml")


def test_the_report_is_a_page_with_its_pictures(finished):
    folder = finished[0].folder / "results/small/report"
    page = (folder / "index.html").read_text()
    assert "What bounds this run, and what to change" in page
    assert re.search(r"<figcaption>\w+, measured: ", page)  # a panel of the timeline
    assert "not the assignment drawn above" not in page
    for name in ("shapes", "costs", "plans", "timeline", "training"):
        assert (folder / f"{name}.svg").read_text().lstrip().startswith("<?xml")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["run"] == "small"
    trained = json.loads((folder.parent / "train/summary.json").read_text())
    assert summary["training"].keys() == trained.keys()
    assert summary["training"]["final_loss"] == pytest.approx(trained["final_loss"], rel=1e-2)


def test_a_finished_run_has_nothing_to_do(finished):
    checkout, config = finished
    again = checkout.snakemake("--cores", "2", "--configfile", config)
    assert again.returncode == 0
    assert "Nothing to be done" in again.stdout + again.stderr


def test_the_range_of_loads_is_made_before_costs_are_measured_and_for_nothing_else(finished):
    checkout, config = finished
    costs, bounds = "results/small/costs.duckdb", checkout.folder / "results/small/load_bounds.json"
    kept = bounds.rename(bounds.with_suffix(".kept"))
    try:
        assert checkout.jobs_of_dry_run(costs, "--configfile", config) == []
        jobs = checkout.jobs_of_dry_run(costs, "--configfile", config, "--config", "costs={repeats: 2}")
    finally:
        kept.rename(bounds)
    assert "merge_shapes" in jobs
    assert jobs.index("merge_shapes") < jobs.index("profile_costs")


def test_costs_are_measured_over_the_range_of_the_data(finished):
    checkout, _ = finished
    bounds = json.loads((checkout.folder / "results/small/load_bounds.json").read_text())
    for module, load in (("vision", "num_items"), ("llm", "num_tokens")):
        rows = pl.read_parquet(checkout.folder / f"results/small/costs/{module}.tp1.parquet")
        assert rows[load].min() == bounds[load][0]
        assert bounds[load][0] < rows[load].max() <= bounds[load][1]  # as far as the time reaches


def test_links_are_measured_between_devices_that_are_at_hand(finished):
    checkout, _ = finished
    analytic = {
        "costs": {"source": "analytic"},
        "cluster": {"device_model": "h100-80g"},
        "train": {"precision": "bf16"},
    }
    for run, sections, jobs in (
        ("here", {}, {"profile_costs", "profile_links", "fit_costs"}),
        ("elsewhere", analytic, {"profile_costs", "fit_costs"}),
    ):
        data = {"sources": [{"path": "data/train.json"}]}
        config = checkout.write_config(f"{run}.yaml", run=run, data=data, **sections)
        target = f"results/{run}/costs.duckdb"
        of_data = {"profile_shapes", "merge_shapes", "cost_settings"}  # which say what to measure over
        assert set(checkout.jobs_of_dry_run(target, "--configfile", config)) - of_data == jobs, run


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train": {"stepz": 3}}, ["train.stepz", "train.steps"]),
        ({"train": {"global_batch_size": 90}}, ["train.global_batch_size", "90", "only 38 records"]),
        ({"data": {"sources": [{"path": "nowhere/train.json"}]}}, ["nowhere/train.json", "data.sources"]),
        (
            {"plan": {"fixed": {"placement": "disjoint", "vision": {"dp": 4}, "llm": {"dp": 4}}}},
            ["plan.fixed", "8 devices", "2"],
        ),
        ({"plan": {"fixed": {"llm": {"tp": 2}}}}, ["plan.fixed.llm.tp", "add 2 to `costs.tp_sizes`"]),
    ],
    ids=["unknown key", "batch beyond the data", "missing manifest", "too few devices", "a tp that is not measured"],
)
def test_a_bad_config_is_one_clear_line_and_exit_code_2(finished, config, said):
    checkout, _ = finished
    data = {"sources": [{"path": "data/train.json"}]}
    path = checkout.write_config("bad.yaml", **({"data": data} | config))
    done = checkout.snakemake("--cores", "2", "-n", "--configfile", path)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("dflop: ")]
    assert len(lines) == 1, done.stderr
    assert all(part in lines[0] for part in said), lines[0]
    assert "Traceback" not in done.stderr + done.stdout


def test_todays_layout_of_other_devices_warns_before_any_job_and_stops_none(finished):
    checkout, _ = finished
    data = {"sources": [{"path": "data/train.json"}]}
    path = checkout.write_config("today.yaml", run="today", data=data, plan={"today": {"llm": {"dp": 8}}})
    done = checkout.snakemake("--cores", "2", "-n", "--configfile", path)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("dflop: "))
    assert line.startswith("dflop: warning: `plan.today.llm` is dp 8 = 8 devices, and `cluster` has 2 (1 x 2), ")


def test_the_demos_shortcuts_are_the_demos_alone(finished):
    checkout, _ = finished
    what_if = "config/examples/plan_without_gpus.yaml"
    for target, arguments, budget_s in (
        ("results/demo/costs/settings.json", (), 30.0),
        ("results/what-if/plan.yaml", ("--configfile", what_if), 90.0),
    ):
        done = checkout.snakemake(target, "-n", "-p", "--cores", "2", *arguments)
        assert f'"time_budget_s": {budget_s}' in done.stdout, done.stderr


def test_the_snakemake_report_is_one_page(finished):
    checkout, config = finished
    done = checkout.snakemake("--configfile", config, "--report", "report.html")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout.folder / "report.html").stat().st_size > 100_000
    assert "results/small/report/index.html" in (checkout.folder / "report.html").read_text()


def test_real_pictures_and_a_real_clip_go_the_whole_way(finished, shared_data):
    folder = finished[0].folder / "results/small"
    samples, rejects = (
        read_table(folder / "shapes.duckdb", table, made_by="").filter(pl.col("source") == "demo_llava")
        for table in ("samples", "rejects")
    )
    assert len(samples) + len(rejects) == 71
    assert set(samples["modality"]) == {"image", "multi_image", "video"}
    scheduled = pl.read_parquet(folder / "schedule.parquet").filter(pl.col("step") < len(_steps(folder)))
    assert len(scheduled.join(samples, on="sample_id", how="semi"))  # and so trained


def test_measured_costs_are_shared_between_runs_module_by_module(finished):
    checkout, _ = finished
    config = checkout.write_config("second.yaml", run="second", data=SMALL["data"], costs=SMALL["costs"])
    paths = [f"costs/{module}.tp1.parquet" for module in ("vision", "llm")]
    done = checkout.snakemake(
        *("--cores", "2", "--configfile", config, *CACHED, *(f"results/second/{path}" for path in paths))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for path in paths:
        first, second = (pl.read_parquet(checkout.folder / f"results/{run}" / path) for run in ("small", "second"))
        assert len(first)
        assert first.equals(second)
