"""A schedule, placement, framework, check or format that the package does not know takes one new file, in a copy of the
package, and no edit. The commands then find it by its name.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml

import dflop

EAGER = '''
"""Like 1F1B with one forward more in flight on every stage."""

from dflop.plan.schedules.schedule import Schedule


class Eager(Schedule):
    name = "eager"

    def ahead(self, stage, pp, num_microbatches, num_chunks):
        return pp - stage


SCHEDULE = Eager()
'''
HALVED = '''
"""Like colocated, with the encoders on the first half of the LLM's pipeline ranks alone."""

from dflop.plan.layout_key import ModuleLayout
from dflop.plan.placements.colocated import Colocated


class Halved(Colocated):
    name = "halved"
    where = "the ranks of the first half of the LLM's stages"

    def encoder_stages(self, pp):
        return range(max(1, pp // 2))

    def encoder_layouts(self, num_ranks, llm, layouts, pp_sizes):
        return [ModuleLayout(llm.layout, 1, len(self.encoder_stages(llm.pp)) * llm.dp)]

    def with_encoders(self, pipeline, first, forwards, backwards):
        num_shared = len(self.encoder_stages(len(pipeline)))
        return [*super().with_encoders(pipeline[:num_shared], first, forwards, backwards), *pipeline[num_shared:]]


PLACEMENT = Halved()
'''
FRAMEWORK = """
from dflop.search.emitted import Emitted, Framework


def flags_of(plan, spec, micro_batch):
    return Emitted(flags={"--stages": str(plan.grid("llm").pp)}, plan=plan)


FRAMEWORK = Framework("Made Up 1.0", flags_of, "--shares")
"""
CHECK = """
def check(asked):
    return f"made up: {asked.plan.grid('llm').pp} stages, {asked.load.text_tokens} tokens"
"""
FORMAT = """
from dflop.shapes.manifests.json_text import open_json as open_file
"""
NEW_FILES = {
    "plan/schedules/eager.py": EAGER,
    "plan/placements/halved.py": HALVED,
    "search/emitters/made_up.py": FRAMEWORK,
    "checks/of_plan/made_up.py": CHECK,
    "shapes/manifests/formats/records.py": FORMAT,
}
# Two plans that differ in the schedule alone: equal computations, and transfers of half their length.
COMPARE = """
import numpy as np
from dflop.plan import Grid, Plan
from dflop.step import Bridges, StageTimes, check_program, compile_plan, make_program, simulate

def step_s(schedule):
    grids = Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=3, pp=3, rank_offset=2)
    plan = Plan(placement="disjoint", grids=grids, num_microbatches=6, schedule=schedule)
    check_program(plan, make_program(plan))
    compiled = compile_plan(plan)
    ones = np.ones((compiled.num_nodes, plan.num_microbatches))
    times = StageTimes(
        forward_s=ones, backward_s=2 * ones, chain_s=0.5 * ones,
        bridges=Bridges.none(), sync_s=np.zeros(compiled.num_nodes),
    )
    return simulate(compiled, times).step_s

print(step_s("eager"), step_s("1f1b"))
"""


@pytest.fixture
def run_python(tmp_path):
    """Runs Python with a copy of the package that has the new files."""
    package = Path(shutil.copytree(Path(dflop.__file__).parent, tmp_path / "changed" / "dflop"))
    for name, text in NEW_FILES.items():
        (package / name).write_text(text, encoding="utf-8")

    def run(*arguments: object) -> str:
        environment = os.environ | {"PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_made_up_schedule_is_ordered_checked_and_simulated(run_python):
    eager_s, plain_s = map(float, run_python("-c", COMPARE).split())
    # One forward more in flight hides the transfers that 1F1B waits for.
    assert eager_s < plain_s


def test_made_up_names_in_the_config_are_searched_for_and_scheduled_with(run_python, make_run, tmp_path):
    run = make_run(llm_pp=3)
    plan = {"schedules": ["1f1b", "eager"], "placements": ["disjoint", "halved"], "search_batches": 2}
    plan["shardings"] = ["optimizer"]  # sharded plans of one stage are faster, and have no schedule
    config = json.dumps(run.config | {"plan": plan})
    files = ["--config", config, "--shapes", run.paths["shapes"], "--costs", run.paths["costs"]]
    candidates = tmp_path / "candidates.parquet"
    run_python("-m", "dflop.cli", "plan", *files, "--out", run.paths["plan"], "--candidates", candidates)
    priced = pl.read_parquet(candidates)
    assert set(priced["schedule"]) == {"1f1b", "eager"}
    assert set(priced["placement"]) == {"disjoint", "halved"}
    assert not priced.filter(schedule="eager")["checkpointing"].any()

    fixed = {"plan.fixed": {"schedule": "eager", "placement": "halved", "llm": {"pp": 4}}}
    config = json.dumps(json.loads(config) | fixed)
    files[1] = config
    out = ["--out", run.paths["plan"], "--candidates", candidates]
    said = run_python("-m", "dflop.cli", "plan", *files, *out, "--emit", "made_up")
    assert "# as flags of Made Up 1.0:\n--stages 4\n" in said
    chosen = yaml.safe_load(run.paths["plan"].read_text())["plan"]
    assert (chosen["schedule"], chosen["placement"]) == ("eager", "halved")
    assert (chosen["grids"]["vision"]["num_ranks"], chosen["grids"]["llm"]["num_ranks"]) == (2, 4)
    out = tmp_path / "schedule.parquet"
    run_python("-m", "dflop.cli", "schedule", *files, "--plan", run.paths["plan"], "--batches", 1, "--out", out)
    stages = pl.read_parquet(tmp_path / "schedule_stages.parquet")
    assert set(stages.filter(module="vision")["dp_rank"]) == {0, 1}
    files = ["--config", config, "--costs", run.paths["costs"], "--plan", run.paths["plan"]]
    said = run_python("-m", "dflop.cli", "check-plan", *files, "--text-tokens", 100, "--side", 56)
    assert "\nmade up: 4 stages, 100 tokens\n\n" in said


def test_a_made_up_format_is_read(run_python, tmp_path):
    manifest = tmp_path / "train.records"
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    manifest.write_text(json.dumps({"messages": turns}))
    config = json.dumps({"data": {"sources": [{"path": str(manifest)}]}})
    (shard,) = run_python("-m", "dflop.cli", "list-shards", "--config", config).splitlines()
    out = tmp_path / "shard.parquet"
    files = ["--config", config, "--shard", shard.split("\t")[0], "--out", out, "--workers", 1]
    run_python("-m", "dflop.cli", "profile-shapes", *files)
    assert pl.read_parquet(out)["modality"].to_list() == ["text"]
