"""What a change reruns: exactly the rules that depend on it, as dry runs list them.

The finished run is one in name: programs that write empty files stand in for the commands, since what reruns follows
from files, params and code alone. The rules, the config and the digests of the code are the real ones.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflop.demo import make_demo_data

pytestmark = pytest.mark.serial

REPOSITORY = Path(__file__).parents[2]
CONFIG = {
    "run": "small",
    "data": {"sources": [{"path": "data/train.json"}, {"path": "data/audio.json"}], "samples_per_shard": 30},
    "train": {"global_batch_size": 8},
}
AFTER_SHAPES = {"merge_shapes", "plot_shapes", "profile_loading"}
AFTER_PLAN = {"preview_schedule", "train", "report", "all"}
AFTER_COSTS = {"fit_costs", "search_plan"} | AFTER_PLAN
MEASURED = {"cost_settings", "profile_costs"} | AFTER_COSTS


@pytest.fixture(scope="module")
def finished(make_checkout):
    """A checkout with a run in which nothing is left to do, and the name of its config file."""
    checkout = make_checkout()
    make_demo_data(checkout.folder / "data", num_records=40)
    manifest = checkout.folder / "data/train.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text())))
    config = checkout.write_config("small.yaml", **CONFIG)
    done = checkout.snakemake("--cores", "2", "--configfile", config, PATH=checkout.path_with_stubs())
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout, config


def _rules(finished, *arguments: str, **environment: str) -> set[str]:
    checkout, config = finished
    return set(checkout.jobs_of_dry_run("--configfile", config, *arguments, **environment))


@pytest.mark.parametrize(
    ("keys", "rules"),
    [
        ([], set()),
        (["train.lr=0.1"], {"train", "report", "all"}),
        (["schedule.lookahead_steps=3"], AFTER_PLAN),
        (["plan.search_batches=3", "cluster.memory_gib=8"], {"search_plan"} | AFTER_PLAN),
        (["cluster.device_model=another"], {"profile_links"} | MEASURED),
        (["costs.repeats=2"], {"profile_links"} | MEASURED),
        (["model.freeze=[vision]"], {"search_plan"} | AFTER_PLAN),
        (["model.lora.rank=4"], MEASURED),
        (["model.freeze=[llm]"], MEASURED),  # its backward passes gradients on, and makes none of weights
        (["model.preset=llava_ov_7b"], {"profile_shapes"} | AFTER_SHAPES | MEASURED),
        (["data.max_llm_tokens=300"], {"profile_shapes", "search_plan"} | AFTER_SHAPES | AFTER_PLAN),
        (["slurm.partition=gpu", "slurm.warn_s=60", "slurm.cpus_per_node=7"], set()),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)
def test_a_key_reruns_what_reads_it(finished, keys, rules):
    assert _rules(finished, *(["--config", *keys] if keys else [])) == rules


@pytest.mark.parametrize(
    ("change", "num_shards"),
    [("a record", 1), ("a source more", 1), ("a source less", 0), ("another mixture", 0)],
)
def test_data_rerun_the_shards_that_are_others_and_what_follows(finished, change, num_shards):
    checkout, config = finished
    manifest, other = checkout.folder / "data/train.json", checkout.folder / "data/other.json"
    before = manifest.read_text()
    records = json.loads(before)
    sources = list(CONFIG["data"]["sources"])
    if change == "a record":
        records[0]["conversations"][-1]["value"] += " Really."
        manifest.write_text(json.dumps(records))
    elif change == "a source more":
        other.write_text(json.dumps(records[:5]))
        sources.append({"path": "data/other.json"})
    elif change == "another mixture":
        sources = [source | {"weight": number} for number, source in enumerate(sources, start=1)]
    else:
        sources.pop()
    changed = checkout.write_config("changed.yaml", data={**CONFIG["data"], "sources": sources})
    try:
        jobs = checkout.jobs_of_dry_run("--configfile", config, changed)
    finally:
        manifest.write_text(before)
    assert jobs.count("profile_shapes") == num_shards
    # A load costs the same whatever data it comes from.
    assert set(jobs) - {"profile_shapes"} == {"search_plan"} | AFTER_SHAPES | AFTER_PLAN


def test_other_weights_to_begin_with_train_again_and_measure_nothing(finished):
    folder = finished[0].folder / "earlier"
    folder.mkdir()
    for weights in (0.0, 1.0):
        save_file({"projector": np.full(3, weights), "llm": np.zeros(5000)}, folder / "model.safetensors")
        assert _rules(finished, "--config", "model.weights=earlier") == {"train", "report", "all"}


def test_a_failure_is_told_in_its_own_words_and_not_with_the_whole_config(finished):
    checkout, config = finished
    failing = checkout.path_with_stubs(dflop="#!/bin/sh\necho noise; echo 'dflop: nothing fits' >&2; exit 2\n")
    done = checkout.snakemake("--cores", "2", "--configfile", config, "--config", "train.lr=0.1", PATH=failing)
    said = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 1
    assert len([line for line in said if "FAILED train" in line]) == 1, said
    assert said.count("    dflop: nothing fits") == 1, said
    assert any("because train.lr was 0.0001 and is 0.1" in line for line in said), said
    assert len(said) < 15, said
    assert "warmup_steps" not in done.stdout + done.stderr  # of the config nothing else
    again = checkout.snakemake("--cores", "2", "--configfile", config, PATH=checkout.path_with_stubs())
    assert again.returncode == 0, again.stderr  # nothing is left to do for the tests that follow


@pytest.fixture
def rules_after(finished):
    """`rules_after(*files)`: what a dry run lists after a line was added to these files of the package, and after that
    program has made files of the results, `made_first`."""
    package = finished[0].folder / "dflop"
    shutil.copytree(REPOSITORY / "dflop", package, ignore=shutil.ignore_patterns("__pycache__"))

    def rules(*files: str, made_first: tuple[str, ...] = ()) -> set[str]:
        for name in files:
            with (package / name).open("a", encoding="utf-8") as file:
                file.write("# another line\n")
        try:
            if made_first:
                checkout, config = finished
                how = {"PYTHONPATH": str(checkout.folder), "PATH": checkout.path_with_stubs()}
                done = checkout.snakemake("--cores", "2", "--configfile", config, "--", *made_first, **how)
                assert done.returncode == 0, done.stdout + done.stderr
            return _rules(finished, PYTHONPATH=str(finished[0].folder))
        finally:
            for name in files:
                shutil.copy(REPOSITORY / "dflop" / name, package / name)

    yield rules
    shutil.rmtree(package)


def test_a_source_file_reruns_the_commands_that_may_use_its_room(rules_after):
    """Which rooms are behind which command is shown for all of them by unit tests of the commands."""
    assert rules_after("models/README.md", "cli/elsewhere.py") == set()
    shapes = {"profile_shapes"} | AFTER_SHAPES
    assert rules_after("shapes/profile.py") == shapes | {"profile_links"} | MEASURED
    assert (
        rules_after("costs/profile_rank.py")
        == {"merge_shapes", "plot_shapes", "profile_loading", "profile_links"} | MEASURED
    )
    assert rules_after("search/best_first.py") == {"plot_shapes", "search_plan"} | AFTER_PLAN
    assert rules_after("train/rank.py") == {"plot_shapes"} | AFTER_PLAN
    assert rules_after("report/report.py") == {"plot_shapes", "report", "all"}
    assert rules_after("cli/training.py") == {"train", "report", "all"}


def test_costs_are_measured_anew_by_another_program_though_it_has_written_their_settings(rules_after):
    """As behind a checkpoint. The settings are the same to the letter. It is the last test: they are not put back."""
    made = "results/small/costs/settings.json", "results/small/load_bounds.json"
    costs = rules_after("costs/profile_rank.py", made_first=made)
    assert "cost_settings" not in costs
    assert costs >= MEASURED - {"cost_settings"}
