"""A recipe's stages are runs that follow each other; what is wrong with one of them is said before the first runs."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from dflop.base import UserError
from dflop.cli import cli
from dflop.config import load_config
from dflop.config.recipe import read_recipe
from dflop.report.page.recipe import write_recipe_page

pytestmark = pytest.mark.usefixtures("in_tmp_path")

RECIPES = Path(__file__).parents[2] / "config/recipes"
STAGES = [{"name": "one", "model": {"freeze": ["vision.encoder", "llm"]}}, {"name": "two", "train": {"lr": 0.5}}]
# So that stages of the same parts measure and search once.
CACHED = "--cache profile_costs profile_links search_plan"
FIGURES = {
    "data": {"num_samples": 1234},
    "plan": {"plan": "disjoint"},
    "training": {"num_steps": 9, "mean_first_loss": 7.5, "mean_final_loss": 2.5, "step_s": 1.5},
}


def write(**values: object) -> Path:
    path = Path("recipe.yaml")
    path.write_text(yaml.safe_dump({"recipe": "r", "stages": STAGES} | values))
    return path


def test_a_stage_has_the_shared_keys_and_its_own_and_begins_with_the_weights_of_the_one_before():
    first, second = read_recipe(write(train={"lr": 0.1, "steps": 3}, seed=4)).stages
    assert (first.run, second.run) == ("r-one", "r-two")
    assert first.config == {
        "train": {"lr": 0.1, "steps": 3},
        "seed": 4,
        "run": "r-one",
        "model": {"freeze": ["vision.encoder", "llm"]},
    }
    assert second.config["train"] == {"lr": 0.5, "steps": 3}
    assert second.config["model"] == {"weights": "results/r-one/train/model"}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_that_come_with_dflop_have_stages_whose_configs_are_right(path):
    recipe = read_recipe(path)
    assert len(recipe.stages) > 1
    for stage in recipe.stages:
        assert load_config(stage.config).run == stage.run


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"recipe": None}, r"recipe\.yaml: `recipe` is None; it must be a name"),
        ({"recipe": "../r"}, r"`recipe` is '\.\./r'"),
        ({"stages": []}, r"`stages` must be a list of configs"),
        ({"stages": ["one"]}, r"`stages\[0\]` is 'one'; it must be a config with a `name`"),
        ({"stages": [{}]}, r"`stages\[0\]\.name` is None"),
        ({"stages": [STAGES[0], STAGES[0]]}, r"`stages\[1\]\.name` is 'one', as an earlier stage's is"),
        ({"stages": [STAGES[0], {"name": "two", "model": "m"}]}, r"`stages\[1\]\.model` is 'm'; it must hold keys"),
        ({"run": "mine"}, r"`stages\[0\]` has `run: mine`; its run is called r-one"),
        ({"stages": [STAGES[0], {"name": "two", "model": {"weights": "x"}}]}, r"begins with the weights of the one be"),
        ({"stages": [STAGES[0], {"name": "two", "model": {"adapter": "x"}}]}, r"into which its adapters are merged"),
    ],
)
def test_a_recipe_that_cannot_be_read_says_where(values, complaint):
    with pytest.raises(UserError, match=complaint):
        read_recipe(write(**values))


@pytest.fixture
def snakemake(monkeypatch) -> Path:
    """A Snakemake that notes its arguments in the file that is returned, and fails in the run that `fails` names."""
    program, calls = Path("bin/snakemake"), Path("calls")
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\necho "$@" >> calls\nfor config; do :; done\n'
        '! grep -qs . fails || ! grep -q "$(cat fails)" "$config"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent.absolute()), prepend=":")
    Path("data.json").write_text("[]")
    return calls


def dflop_recipe(*arguments: str, data: str = "data.json") -> Result:
    path = write(data={"sources": [{"path": "data.json"}]}, stages=[STAGES[0], STAGES[1] | {"data.sources": [data]}])
    path.write_text(path.read_text().replace(f"- {data}", f"- path: {data}"))
    return CliRunner().invoke(cli, ["recipe", str(path), *arguments])


def test_the_workflow_runs_once_a_stage_with_what_is_given_for_it(snakemake):
    assert dflop_recipe("--profile", "slurm", "-n").exit_code == 0
    assert snakemake.read_text().splitlines() == [
        f"--profile slurm -n {CACHED} --configfile results/r/stages/{stage}.yaml" for stage in ("one", "two")
    ]
    assert yaml.safe_load(Path("results/r/stages/two.yaml").read_text())["run"] == "r-two"


def test_a_stage_that_fails_is_named_and_none_follows(snakemake):
    Path("fails").write_text("run: r-one")
    result = dflop_recipe()
    assert str(result.exception) == "stage `one` ended with exit code 1, see above; the same command goes on there"
    assert snakemake.read_text().splitlines() == [f"--cores all {CACHED} --configfile results/r/stages/one.yaml"]


def test_data_of_a_later_stage_that_are_not_there_are_said_before_anything_runs(snakemake):
    result = dflop_recipe(data="none.json")
    assert "stage `two`: the manifest none.json (source `none`) does not exist" in str(result.exception)
    assert not snakemake.exists()


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (
            {"model": {"train": ["llm.layers.[8-9]"]}},
            "stage `two`: `model.train[0]` is 'llm.layers.[8-9]'; it must be one",
        ),
        (
            {"model": {"lora": {"targets": ["*.query"]}}},
            "stage `two`: `model.lora.targets[0]` is '*.query', which matches",
        ),
        ({"train": {"modules": {"eyes": {"lr": 1}}}}, "stage `two`: `train.modules.eyes` is 'eyes'; it must be one of"),
        ({"plan": {"fixed": {"llm": {"tp": 2}}}}, "stage `two`: `plan.fixed.llm.tp` is 2: there are costs at tp 1"),
        (
            {"data": {"sources": [{"path": "data.json", "media_root": "none"}]}},
            "the media root none (source `data`) is",
        ),
    ],
)
def test_what_a_later_stage_cannot_train_is_said_before_anything_runs(snakemake, second, complaint):
    path = write(data={"sources": [{"path": "data.json"}]}, stages=[STAGES[0], STAGES[1] | second])
    assert complaint in str(CliRunner().invoke(cli, ["recipe", str(path)]).exception)
    assert not snakemake.exists()


def test_a_first_stage_needs_the_weights_that_it_begins_with(snakemake):
    path = write(data={"sources": [{"path": "data.json"}]}, model={"weights": "nowhere"})
    said = str(CliRunner().invoke(cli, ["recipe", str(path)]).exception)
    assert "stage `one`: `model.weights` is nowhere, which holds no *.safetensors file" in said


def test_a_folder_may_begin_with_a_recipe():
    assert CliRunner().invoke(cli, ["init", "mine", "--recipe", "qwen_vl_lora"]).exit_code == 0
    assert read_recipe(Path("mine/recipe.yaml")).name == "qwen-vl-lora"
    said = str(CliRunner().invoke(cli, ["init", "other", "--recipe", "llava"]).exception)
    assert said.startswith("there is no recipe 'llava'; there are demo, llava_onevision, qwen_vl_lora")
    assert not Path("other").exists()


def test_a_recipe_that_is_not_there_says_where_some_are():
    with pytest.raises(UserError, match=r"the recipe none\.yaml does not exist; config/recipes has some"):
        read_recipe(Path("none.yaml"))


def test_a_config_of_all_stages_is_refused_as_it_would_replace_theirs(snakemake):
    assert "--configfile would replace the stages' own configs" in str(dflop_recipe("--configfile", "x").exception)
    assert not snakemake.exists()


def test_the_page_leads_to_the_reports_of_the_stages_that_have_one():
    recipe = read_recipe(write())
    assert write_recipe_page(Path("results/r"), recipe) is None
    Path("results/r").mkdir(parents=True)
    Path("results/r-one/report").mkdir(parents=True)
    Path("results/r-one/report/summary.json").write_text(json.dumps(FIGURES))
    page = write_recipe_page(Path("results/r"), recipe).read_text()
    assert '<a href="../r-one/report/index.html">one</a>' in page
    assert "vision.encoder, llm" in page
    assert "1,234" in page
    assert "not trained yet" in page
