"""Shapes as a user's dataset changes: what a dry run lists, and what the database then holds."""

import json
import os
from importlib.resources import files

import pytest
from PIL import Image

from dflop.store import read_meta, read_table

pytestmark = pytest.mark.serial

TARGET = "results/shapes/shapes.duckdb"


def text_record(number: int) -> dict:
    turns = [{"from": "human", "value": f"What is {number} and one?"}, {"from": "gpt", "value": str(number + 1)}]
    return {"id": f"text-{number}", "conversations": turns}


def picture_record(number: int) -> dict:
    turns = [{"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", "value": "Red."}]
    return {"id": f"picture-{number}", "image": f"{number}.png", "conversations": turns}


@pytest.fixture(scope="module")
def profiled(make_checkout):
    """A checkout whose config lists 60 texts as lines and 40 pictures as a list of datasets, all profiled."""
    checkout = make_checkout()
    data = checkout.folder / "data"
    data.mkdir()
    (data / "texts.jsonl").write_text("".join(json.dumps(text_record(number)) + "\n" for number in range(60)))
    (data / "pictures.json").write_text(json.dumps([picture_record(number) for number in range(40)]))
    for number in range(40):
        Image.new("RGB", (40 + number, 60)).save(data / f"{number}.png")
    (data / "mix.yaml").write_text("datasets:\n- json_path: data/pictures.json\n  sampling_strategy: end:50%\n")
    sources = [{"path": "data/texts.jsonl"}, {"path": "data/mix.yaml"}]
    config = checkout.write_config("shapes.yaml", run="shapes", data={"sources": sources, "samples_per_shard": 10})
    done = checkout.snakemake(TARGET, "--cores", "2", "--configfile", config)
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout, config


def jobs(profiled) -> list[str]:
    """The rules that a dry run for the shapes lists."""
    checkout, config = profiled
    return checkout.jobs_of_dry_run(TARGET, "--configfile", config)


def test_sampled_records_are_profiled_and_know_their_rows(profiled):
    samples = read_table(profiled[0].folder / TARGET, "samples", made_by="merge-shapes")
    assert samples["source"].value_counts(sort=True).rows() == [("texts", 60), ("pictures", 20)]
    pictures = samples.filter(samples["source"] == "pictures")
    assert pictures["row"].to_list() == list(range(20, 40))
    assert pictures["sample_id"].to_list() == [f"picture-{number}" for number in range(20, 40)]


def test_small_shards_take_one_core_each(profiled):
    checkout, config = profiled
    listed = checkout.snakemake(TARGET, "-n", "--cores", "4", "--forceall", "--configfile", config).stdout
    assert listed.count("rule profile_shapes:") > 5
    assert "threads: 4" not in listed


def test_an_unchanged_dataset_reruns_nothing(profiled):
    assert jobs(profiled) == []


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(0, id="front", marks=pytest.mark.exhaustive),
        pytest.param(30, id="middle"),
        pytest.param(60, id="end", marks=pytest.mark.exhaustive),
    ],
)
def test_an_inserted_record_reruns_a_shard_or_two_and_the_merge(profiled, place):
    manifest = profiled[0].folder / "data/texts.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    try:
        manifest.write_text("".join([*lines[:place], json.dumps(text_record(777)) + "\n", *lines[place:]]))
        listed = jobs(profiled)
    finally:
        manifest.write_text("".join(lines))
    assert set(listed) == {"profile_shapes", "merge_shapes"}
    assert listed.count("profile_shapes") <= 2


def test_a_changed_record_reruns_its_shard_and_the_merge(profiled):
    manifest = profiled[0].folder / "data/texts.jsonl"
    before = manifest.read_text()
    try:
        manifest.write_text(before.replace("What is 50 and one?", "How much is 50 and one?"))
        listed = jobs(profiled)
    finally:
        manifest.write_text(before)
    assert sorted(listed) == ["merge_shapes", "profile_shapes"]


def test_a_removed_source_takes_its_samples_with_it_and_reruns_the_merge_alone(profiled):
    checkout, config = profiled
    without = checkout.write_config(
        "without.yaml", run="shapes", data={"sources": [{"path": "data/texts.jsonl"}], "samples_per_shard": 10}
    )
    assert checkout.jobs_of_run(TARGET, "--configfile", without) == ["merge_shapes"]
    assert set(read_table(checkout.folder / TARGET, "samples", made_by="merge-shapes")["source"]) == {"texts"}
    assert checkout.snakemake(TARGET, "--cores", "2", "--configfile", config).returncode == 0


def test_a_source_of_the_same_name_that_comes_or_goes_reruns_no_shard_of_the_others(profiled):
    checkout, _ = profiled
    paths = [f"data/{folder}/train.jsonl" for folder in "xyz"]
    for number, path in enumerate(paths):
        (checkout.folder / path).parent.mkdir()
        (checkout.folder / path).write_text("".join(json.dumps(text_record(7 * number + i)) + "\n" for i in range(60)))

    def config_of(*chosen: str) -> str:
        sources = [{"path": path, "sampling": "random:50%"} for path in chosen]
        return checkout.write_config("same.yaml", run="same", data={"sources": sources, "samples_per_shard": 100})

    target = "results/same/shapes.duckdb"
    done = checkout.snakemake(target, "--cores", "2", "--configfile", config_of(*paths))
    assert done.returncode == 0, done.stdout + done.stderr
    for chosen in (paths[1:], paths[::-1], paths[1:2]):
        assert checkout.jobs_of_dry_run(target, "--configfile", config_of(*chosen)) == ["merge_shapes"]


def test_a_key_that_is_no_matter_of_shapes_reruns_none(profiled):
    checkout, config = profiled
    assert checkout.jobs_of_dry_run(TARGET, "--configfile", config, "--config", "seed=9", "train={steps: 7}") == []


def test_a_watched_picture_that_is_replaced_reruns_its_shard_and_only_then(profiled):
    checkout, _ = profiled
    sources = [{"path": "data/pictures.json"}]
    config = checkout.write_config(
        "watched.yaml", run="watched", data={"sources": sources, "samples_per_shard": 10, "watch_media": True}
    )
    target = "results/watched/shapes.duckdb"
    done = checkout.snakemake(target, "--cores", "2", "--configfile", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert checkout.jobs_of_dry_run(target, "--configfile", config) == []
    picture = checkout.folder / "data/7.png"
    Image.new("RGB", (300, 50)).save(picture)
    os.utime(picture, (1, 1))
    assert sorted(checkout.jobs_of_run(target, "--configfile", config)) == ["merge_shapes", "profile_shapes"]
    samples = read_table(checkout.folder / target, "samples", made_by="merge-shapes")
    assert samples.filter(samples["sample_id"] == "picture-7")["num_items"].to_list() != [2]


def test_shapes_of_internvl_are_made_of_the_same_data(profiled):
    checkout, _ = profiled
    config = checkout.write_config(
        "internvl.yaml",
        run="internvl",
        data={"sources": [{"path": "data/pictures.json"}]},
        model={"family": "internvl", "preset": "internvl_8b"},
    )
    target = "results/internvl/shapes.duckdb"
    done = checkout.snakemake(target, "results/internvl/report/shapes.svg", "--cores", "2", "--configfile", config)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = read_table(checkout.folder / target, "samples", made_by="merge-shapes")
    assert (samples["vision_tokens"] == 256 * samples["num_items"]).all()


def test_a_plan_for_hardware_that_is_not_at_hand_says_what_it_stands_on(profiled):
    checkout, _ = profiled
    sections = {
        "run": "analytic",
        "data": {"sources": [{"path": "data/pictures.json"}]},
        "cluster": {"device": "cuda", "devices_per_node": 4, "device_model": "ours", "device_models": "devices.yaml"},
        "costs": {"source": "analytic", "implementation": "eager", "tp_sizes": [1]},
        "plan": {"search_batches": 1, "placements": ["disjoint"], "fixed": {"num_microbatches": 8}},
        "train": {"precision": "bf16", "global_batch_size": 8},
    }
    config = checkout.write_config("analytic.yaml", **sections)
    known = files("dflop.base") / "devices.yaml"
    devices = checkout.folder / "devices.yaml"
    devices.write_text(known.read_text().replace("h100-80g:", "ours:"))
    plan, folder = "results/analytic/plan.yaml", checkout.folder / "results/analytic"
    done = checkout.snakemake(plan, "--cores", "2", "--configfile", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "costs: ours, analytic" in (folder / "plan.yaml").read_text()
    assert read_meta(folder / "costs.duckdb", made_by="fit-costs")["source"] == "analytic"
    assert checkout.jobs_of_dry_run(plan, "--configfile", config) == []
    devices.write_text(devices.read_text().replace("3350e9", "3000e9"))
    assert {"profile_costs", "fit_costs"} <= set(checkout.jobs_of_dry_run(plan, "--configfile", config))
    sections["cluster"] |= {"device_model": "h1000"}
    refused = checkout.snakemake(
        plan, "-n", "--cores", "2", "--configfile", checkout.write_config("no.yaml", **sections)
    )
    assert refused.returncode == 2
    assert "h1000" in refused.stderr
    assert "h100-80g" in refused.stderr
