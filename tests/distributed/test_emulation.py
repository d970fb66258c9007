"""An emulated cluster: four processes that sleep in place of computing, and do all else as training does."""

import json
from collections import defaultdict

import duckdb
import pytest
from processes import run_command
from small_runs import prepare
from training_runs import plan_file

from dflop.config import load_config
from dflop.plan import load_plan
from dflop.plan.trained import EVERYTHING
from dflop.schedule.service import open_scheduler
from dflop.step import Op, StepInstructions, make_program

pytestmark = pytest.mark.serial

NUM_STEPS, BATCH_SIZE = 5, 8  # as many as an epoch has
PASSES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.SYNC_GRADIENTS: "sync",
}
LAYOUTS = {
    "disjoint, pipelined": {"llm_pp": 3, "num_microbatches": 4},
    "colocated, shared": {"llm_dp": 4, "placement": "colocated", "sharding": "parameters"},
    "colocated, samples over 2": {"llm_dp": 2, "llm_pp": 2, "llm_cp": 2, "placement": "colocated"},
}


@pytest.fixture(scope="module")
def long_run(dataset, tmp_path_factory):
    """A run in which some samples are texts of a thousand words."""
    turns = [{"from": "human", "value": "word " * 1000}, {"from": "gpt", "value": "Several words."}]
    path = tmp_path_factory.mktemp("long") / "long.json"
    path.write_text(json.dumps([{"id": f"long-{number}", "conversations": turns} for number in range(8)]))
    return prepare(tmp_path_factory.mktemp("long-run"), [dataset, path], "llava_onevision")


@pytest.fixture(scope="module", params=LAYOUTS)
def emulated(request, tmp_path_factory):
    """The plan, the run's folder with its config, and what the emulation wrote."""
    folder, config = request.getfixturevalue("long_run" if "over 2" in request.param else "run")
    plan, out = plan_file(folder, **LAYOUTS[request.param]), tmp_path_factory.mktemp("emulated") / "out"
    config = config | {"train": config["train"] | {"steps": NUM_STEPS}}
    arguments = ["train", "--config", json.dumps(config), "--shapes", str(folder / "shapes.duckdb")]
    arguments += ["--plan", str(plan), "--emulate", str(folder / "costs.duckdb"), "--out", str(out)]
    code = run_command([*arguments, "--emulate-scale", "0.1"], out.parent / "log")
    log = (out.parent / "log").read_text()
    assert code == 0, log
    return load_plan(plan), folder, load_config(config), plan, out, log


def test_every_rank_computes_what_its_instructions_say_in_their_order(emulated):
    plan, _, _, _, out, _ = emulated
    program = make_program(plan)
    with duckdb.connect(str(out / "observations.duckdb"), read_only=True) as database:
        rows = database.sql(
            'SELECT step, rank, module, pp_stage, dp_rank, "pass", microbatch FROM observations ORDER BY step, start_s'
        ).fetchall()
        assert database.sql("SELECT value FROM meta WHERE key = 'emulated'").fetchall() == [("true",)]
        # Nobody wakes before it is time.
        early = "SELECT * FROM observations WHERE \"pass\" = 'forward' AND seconds < predicted_s - 1e-6"
        assert database.sql(early).fetchall() == []
    seen = defaultdict(list)
    for step, rank, *what in rows:
        seen[step, rank].append(tuple(what))
    for rank in range(plan.world_size):
        expected = []
        for item in StepInstructions(plan, program, EVERYTHING, rank).of(None):
            if item.op in PASSES:
                node = program.nodes[item.node]
                expected.append((node.module, node.pp_stage, node.dp_rank, PASSES[item.op], item.microbatch))
        for step in range(NUM_STEPS):
            assert seen.pop((step, rank)) == expected
    assert not seen


def test_every_sample_of_an_epoch_comes_through_the_last_stage_once(emulated):
    _, folder, config, plan, out, _ = emulated
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [own["step"] for own in steps] == list(range(NUM_STEPS))
    assert all(own["emulated"] and own["num_samples"] == BATCH_SIZE for own in steps)
    scheduler = open_scheduler(config, shapes=folder / "shapes.duckdb", costs=folder / "costs.duckdb", plan=plan)
    schedules = [scheduler.schedule(step) for step in range(NUM_STEPS)]
    drawn = [own for schedule in schedules for own in schedule.whole_samples().sample_id.tolist()]
    assert len(set(drawn)) == len(drawn) == sum(own["num_samples"] for own in steps)
    assert any(schedule.shared_samples() for schedule in schedules) == (load_plan(plan).grid("llm").cp > 1)
    for own in steps:
        assert own["predicted_step_s"] == pytest.approx(0.1 * scheduler.schedule(own["step"]).step_s)
        assert own["pipeline_s"] > 0


def test_measured_beside_predicted_is_printed_and_written_and_nothing_looks_like_a_training(emulated):
    *_, out, log = emulated
    summary = json.loads((out / "summary.json").read_text())
    assert summary["emulated"]
    assert summary["num_steps"] == NUM_STEPS
    median = summary["measured_over_predicted"]["median"]
    assert f"measured over predicted: median {median:.3f}" in log
    written = {path.name for path in out.iterdir()}
    assert written == {"metrics.jsonl", "observations", "observations.duckdb", "summary.json", "trace.json"}
