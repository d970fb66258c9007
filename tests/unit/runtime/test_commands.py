"""A command sees the keys it lists and no other, and the code behind it is what it uses."""

import re
from pathlib import Path

import pytest

import dflop
from dflop.cli import cli
from dflop.config import load_config, restrict, select_keys
from dflop.runtime.code_behind import CodeBehind, code_digests
from dflop.runtime.commands import COMMANDS, IN_PARAMS

PACKAGE = Path(dflop.__file__).parent
AFTER_PLAN = {"schedule", "train", "report"}


@pytest.fixture(scope="module")
def reached() -> dict[str, tuple[set[tuple[str, str]], set[Path]]]:
    """Of each command the definitions and files behind it."""
    behind = CodeBehind(PACKAGE, IN_PARAMS)
    return {name: behind.reach(command.function) for name, command in COMMANDS.items()}


def test_a_restricted_config_has_the_keys_it_was_given():
    config = load_config({"train": {"lr": 0.5}, "data": {"sources": [{"path": "a.json"}]}})
    part = restrict(config, ["seed", "train.lr", "data"])
    assert (part.seed, part.train.lr, part.data) == (0, 0.5, config.data)


@pytest.mark.parametrize("read", [lambda c: c.run, lambda c: c.model, lambda c: c.train.steps, lambda c: c.data.video])
def test_reading_any_other_key_of_a_restricted_config_fails(read):
    part = restrict(load_config(), ["seed", "train.lr", "data.sources"])
    with pytest.raises(AttributeError):
        read(part)


def test_restricting_leaves_the_config_itself_alone():
    config = load_config()
    restrict(config, ["seed", "train.lr"])
    assert config == load_config()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_that_a_command_reads_exists(name):
    config = load_config()
    part = restrict(config, COMMANDS[name].reads)
    assert select_keys(part, COMMANDS[name].reads) == select_keys(config, COMMANDS[name].reads)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_one_of_the_program_and_its_function_is_found(name, reached):
    function = cli.commands[name].callback
    assert COMMANDS[name].function == f"{function.__module__}.{function.__name__}"
    assert len(reached[name][0]) > 10


@pytest.mark.parametrize(
    ("definition", "commands"),
    [
        ("data.demo.dataset.make_demo_data", {"demo-data"}),
        ("data.profile.profile_shard", {"profile-shapes"}),
        ("store.shapes.write_shapes", {"merge-shapes"}),
        ("reporting.shapes.draw_shapes", {"plot-shapes"}),
        ("costs.profile_rank.main", {"profile-costs"}),
        ("costs.links.main", {"profile-links"}),
        ("data.measure_loading.measure_loading", {"profile-loading"}),
        ("costs.fit.fit_costs", {"fit-costs"}),
        ("planning.search.search_plans", {"plan", "compare"}),
        ("comparison.compare.compare_systems", {"compare"}),
        ("scheduling.preview.preview_frames", {"schedule"}),
        ("training.rank.main", {"train"}),
        ("reporting.training.draw_training", {"report"}),
        ("costs.link_model.fit_links", {"fit-costs"}),
        ("pricing.transfers.find_link", {"plan", "compare", *AFTER_PLAN}),
        ("pricing.pricer.Pricer", {"plan", "compare", *AFTER_PLAN}),
        ("balancing.cbc_process.main", {"plan", "compare", *AFTER_PLAN}),
        (
            "models.internvl.shapes.InternvlShapes",
            {"profile-shapes", "profile-loading", "profile-costs", "plan", "compare", *AFTER_PLAN},
        ),
        # Of analytic costs, and what ZB-H1 keeps of a layer.
        ("models.internvl.work.count_work", {"profile-costs", "plan", "compare", *AFTER_PLAN}),
        ("models.llava_onevision.stages.VisionStage", {"profile-loading", "profile-costs", "train"}),
        ("data.text.ChatTokenizer", {"profile-shapes", "profile-loading", "profile-costs", "train"}),
        ("runtime.torchrun.run_ranks", {"profile-costs", "profile-links", "train"}),
        ("balancing.sampler.BalancedBatchSampler", set()),
    ],
)
def test_a_definition_is_behind_the_commands_that_use_it_and_no_other(reached, definition, commands):
    module, _, name = f"dflop.{definition}".rpartition(".")
    assert hasattr(__import__(module, fromlist=[name]), name)
    assert {command for command, (found, _) in reached.items() if (module, name) in found} == commands


def test_each_rule_tracks_the_code_of_the_command_that_it_runs():
    """With the reach of every definition above, that is all that decides what a change of code reruns."""
    tracked = {}
    for path in sorted((PACKAGE.parent / "workflow" / "rules").glob("*.smk")):
        for rule in re.split(r"^(?:rule|checkpoint) ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            commands = re.findall(r'"(?:\{resources.launcher\} )?dflop ([a-z-]+) ', rule)
            tracked[rule.partition(":")[0]] = commands, re.findall(r'code_digest\("([a-z-]+)"\)', rule)
    # What measures costs is tracked through the file of settings, which another rule writes.
    by_settings = {"cost_settings": ([], ["profile-costs"]), "profile_costs": (["profile-costs"], [])}
    assert {name: tracked.pop(name) for name in by_settings} == by_settings
    assert all(len(commands) == 1 and commands == digests for commands, digests in tracked.values()), tracked
    assert {command for commands, _ in tracked.values() for command in commands} == COMMANDS.keys() - {"profile-costs"}


def test_the_chat_template_is_behind_those_that_read_text_and_data_sheets_stand_in_the_params(reached):
    def of_whom(name: str) -> set[str]:
        return {command for command, (_, files) in reached.items() if PACKAGE / name in files}

    assert of_whom("data/tokenizer/chat_template.jinja") >= {"profile-shapes", "profile-costs", "train"}
    assert of_whom("runtime/devices.yaml") == set()


def test_digests_are_kept_until_something_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(".snakemake").mkdir()
    entry = COMMANDS["plot-shapes"].function
    (digest,) = code_digests([entry], IN_PARAMS).values()
    kept = Path(".snakemake/dflop/code.json")
    kept.write_text(kept.read_text().replace(digest, "as kept"))
    assert code_digests([entry], IN_PARAMS) == {entry: "as kept"}
    assert code_digests([entry], IN_PARAMS | {"dflop.nothing"}) == {entry: digest}
