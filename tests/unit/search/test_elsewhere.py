"""`dflop plan --manifest`: from a manifest and a config.json to a plan, its page and its flags, without a GPU."""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml

from dflop.base import UserError
from dflop.cli import cli
from dflop.models.llava_onevision.presets import PRESETS
from dflop.search import TODAY

EIGHT_NODES = Path(__file__).parents[3] / "config/examples/slurm_eight_nodes.yaml"
SMALL = (
    *("cluster.devices_per_node=2", "cluster.gpu_hour_cost=2.5", "costs.tp_sizes=[1]", "costs.implementation=eager"),
    *("train.global_batch_size=8", "plan.search_batches=1", "plan.today={placement: monolithic, num_microbatches: 2}"),
    "plan.placements=[disjoint, colocated]",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a manifest of pictures that are not there, whose sizes it says, and a model's config.json alone."""
    folder = tmp_path_factory.mktemp("place")
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A picture."}]
    records = [
        {"id": f"sample {number}", "image": f"{number}.jpg", "width": 100 + 40 * number, "height": 120}
        | {"conversations": turns}
        for number in range(24)
    ]
    (folder / "train.json").write_text(json.dumps(records))
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps({"model_type": "llava_onevision", **PRESETS["tiny"]}))
    return folder


@pytest.fixture(scope="module")
def planned(place) -> Path:
    """The folder that the command has made."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.chdir(place)
        plan("mine", "--manifest", "train.json", "--model", "model", "--emit", "torchtitan")
    (place / "said").write_text(said.getvalue())
    return place / "results/mine"


def plan(*arguments: str) -> None:
    options = [part for option in SMALL for part in ("--config", option)]
    cli.main(["plan", *options, *arguments], standalone_mode=False)


def test_a_manifest_and_a_config_are_enough_for_a_plan_and_its_page(planned):
    said = yaml.safe_load((planned / "plan.yaml").read_text())
    assert said["costs"] == "h100-80g, analytic"
    assert sum(grid["num_ranks"] for grid in said["plan"]["grids"].values()) in (2, 4)
    page = (planned / "report/index.html").read_text()
    assert "24 samples of 1 source" in page
    assert "No record was refused." in page
    assert "Costs are analytic: computed from the model&#39;s structure and the data sheet of h100-80g" in page
    assert "Not trained yet; predicted from analytic costs, it is: " in page
    assert "these costs are analytic, and nothing was measured on your devices" in page


def test_the_plan_in_another_trainers_words_is_a_file_with_its_price(planned):
    text = (planned / "plan.torchtitan.txt").read_text()
    assert "--parallelism.tensor_parallel_degree 1 " in text
    step_s = yaml.safe_load((planned / "plan.yaml").read_text())["predicted"]["step_s"]
    assert f"# Predicted step: {step_s:.3g} s as planned" in text


def test_an_epoch_is_priced_beside_one_with_todays_layout(planned):
    chosen = yaml.safe_load((planned / "plan.yaml").read_text())
    (today,) = (own for own in chosen["baselines"] if own["name"] == TODAY)
    assert "monolithic" in today["plan"]
    out = (planned.parents[1] / "said").read_text()
    (priced,) = (line for line in out.splitlines() if " at 2.50 an hour" in line)
    assert priced.startswith("an epoch of 24 samples, 3 steps: ")
    ours, theirs = (f"{3 * 2 * step_s / 3600:.3g}" for step_s in (chosen["predicted"]["step_s"], today["step_s"]))
    assert re.fullmatch(rf".* steps: {ours} \S+-hours, .* an hour; with today's layout {theirs} .*", priced)
    page = (planned / "report/index.html").read_text()
    assert "today&#39;s layout would take" in page
    assert "at 2.50 an hour" in page


@pytest.mark.exhaustive
def test_the_example_of_eight_nodes_says_what_it_saves_beside_todays_layout(tmp_path, monkeypatch, capsys):
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A picture."}]
    records = [
        {"id": str(number), "image": f"{number}.jpg", "width": 100 + number, "height": 300, "conversations": turns}
        for number in range(600)
    ]
    monkeypatch.chdir(tmp_path)
    Path("train.json").write_text(json.dumps(records))
    options = (
        "costs.source=analytic",
        "costs.tp_sizes=[2]",  # that of today's layout
        "model={path: null, preset: llava_ov_7b}",
        "plan.search_batches=1",
    )
    given = [part for option in (str(EIGHT_NODES), *options) for part in ("--config", option)]
    cli.main(["plan", "what-if", "--manifest", "train.json", *given], standalone_mode=False)
    said = yaml.safe_load(Path("results/what-if/plan.yaml").read_text())
    today = said["baselines"][0]
    assert today["name"] == TODAY
    assert today["plan"].endswith("vision tp2 pp1 dp32 + llm tp2 pp1 dp32, 8 microbatches, 1f1b, checkpointing")
    out = capsys.readouterr().out
    (shown_s,) = re.findall(r"(\S+) s .*today's layout, random", out)
    assert float(shown_s) == pytest.approx(today["step_s"], abs=6e-4)
    (priced,) = (line for line in out.splitlines() if " at 2.50 an hour" in line)
    assert priced.startswith("an epoch of 600 samples, 2 steps: ")
    money = [2 * 64 * step_s / 3600 * 2.5 for step_s in (said["predicted"]["step_s"], today["step_s"])]
    assert f"GPU-hours, {money[0]:.2f} at 2.50 an hour; with today's layout " in priced
    assert f"GPU-hours, {money[1]:.2f} (predicted)" in priced
    page = Path("results/what-if/report/index.html").read_text()
    assert "today&#39;s layout would take" in page
    assert "at 2.50 an hour" in page


def test_what_was_made_is_a_run_like_any_other(planned, monkeypatch, capsys):
    monkeypatch.chdir(planned.parents[1])
    cli.main(["plan", "mine"], standalone_mode=False)
    assert "chosen: " in capsys.readouterr().out


def test_neither_shapes_nor_costs_are_made_again_for_another_cluster(planned, monkeypatch, capsys):
    monkeypatch.chdir(planned.parents[1])
    made = [planned / "shapes.duckdb", planned / "costs.duckdb"]
    before = [path.stat().st_mtime_ns for path in made]
    changed = ("--config", "cluster.num_nodes=2", "--config", "cluster.gpu_hour_cost=null")
    plan("mine", "--manifest", "train.json", "--model", "model", *changed)
    assert [path.stat().st_mtime_ns for path in made] == before
    said = capsys.readouterr().out
    assert "for 4 devices (h100-80g, analytic costs)" in said
    assert "an epoch of" not in said  # without a price
    model = Path("model/config.json")
    model.write_text(json.dumps(json.loads(model.read_text()) | {"changed": True}))
    plan("mine", "--manifest", "train.json", "--model", "model", *changed)
    assert [path.stat().st_mtime_ns > time_ns for path, time_ns in zip(made, before, strict=True)] == [True, True]


def test_a_model_without_a_manifest_is_refused(place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match="--model goes with --manifest"):
        plan("mine", "--model", "model")


def test_measured_costs_are_the_workflows(place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match="costs are measured by the workflow"):
        plan("mine", "--manifest", "train.json", "--model", "model", "--config", "costs.source=measured")


def test_a_manifest_that_is_not_there_is_named(place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match=r"nowhere\.json does not exist; name a manifest"):
        plan("mine", "--manifest", "nowhere.json")


def test_a_run_of_the_workflow_is_never_written_over(place, monkeypatch):
    monkeypatch.chdir(place)
    kept = place / "results/trained/costs.duckdb"
    kept.parent.mkdir(parents=True)
    kept.write_text("measured")
    with pytest.raises(UserError, match=r"results/trained holds a run that the workflow made.*a name of its own"):
        plan("trained", "--manifest", "train.json", "--model", "model")
    assert kept.read_text() == "measured"
    assert [path.name for path in kept.parent.iterdir()] == ["costs.duckdb"]
