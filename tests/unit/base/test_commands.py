"""A command sees the keys it lists and no other, and tracks every room whose code it uses."""

import ast
import re
import shutil
from pathlib import Path

import pytest

import dflop
from dflop.base import commands
from dflop.base.commands import COMMANDS, ROOMS, code_digest
from dflop.cli import cli
from dflop.config import load_config, restrict, select_keys

PACKAGE = Path(dflop.__file__).parent


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


def rooms_behind(name: str) -> list[str]:
    """The rooms that a command's function names, or a function of its file that it calls: in imports, and in texts such
    as "dflop.train.rank"."""
    tree = ast.parse((PACKAGE / "cli" / COMMANDS[name].file).read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting, seen, named = [cli.commands[name].callback.__name__], set(), set()
    while waiting:
        function = waiting.pop()
        seen.add(function)
        for node in ast.walk(functions[function]):
            if isinstance(node, ast.ImportFrom):
                named.add(node.module)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value)
            elif isinstance(node, ast.Name) and node.id in functions and node.id not in seen:
                waiting.append(node.id)
    rooms = {text.split(".")[1] for text in named if text.startswith("dflop.")}
    return sorted(rooms & set(ROOMS), key=ROOMS.index)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tracks_its_file_and_all_rooms_up_to_the_last_that_it_uses(name):
    assert cli.commands[name].callback.__module__ == f"dflop.cli.{Path(COMMANDS[name].file).stem}"
    assert rooms_behind(name)[-1] == COMMANDS[name].last_room


def test_a_command_follows_the_files_of_its_rooms_and_its_own_and_no_others(tmp_path, monkeypatch):
    package = tmp_path / "dflop"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(commands, "_PACKAGE", package)

    def digests() -> dict[str, str]:
        commands._digest.cache_clear()
        return {name: code_digest(name) for name in COMMANDS}

    def followers(file: str) -> set[str]:
        """The commands whose digest changes with a file."""
        before = digests()
        with (package / file).open("a", encoding="utf-8") as opened:
            opened.write("\n")
        after = digests()
        return {name for name in COMMANDS if before[name] != after[name]}

    try:
        assert followers("config/schema.py") == followers("models/family.py") == COMMANDS.keys()
        assert COMMANDS.keys() - followers("shapes/tokenizer/chat_template.jinja") == {"demo-data"}
        assert COMMANDS.keys() - followers("costs/fit.py") == {"demo-data", "profile-shapes", "profile-loading"}
        assert followers("search/best_first.py") == {"plan", "compare", "schedule", "train", "report", "plot-shapes"}
        assert followers("report/page/templates/pictures.js") == {"compare", "report", "plot-shapes"}
        assert followers("cli/plans.py") == {"plan", "schedule"}
        (package / "models/__pycache__").mkdir()
        for without in ("cli/elsewhere.py", "models/README.md", "models/__pycache__/kernel.nbi"):
            assert followers(without) == set()
    finally:
        commands._digest.cache_clear()


def test_each_rule_tracks_the_code_of_the_command_that_it_runs():
    """With the rooms of every command above, that is all that decides what a change of code reruns."""
    tracked = {}
    for path in sorted((PACKAGE.parent / "workflow" / "rules").glob("*.smk")):
        for rule in re.split(r"^(?:rule|checkpoint) ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            commands = re.findall(r'"(?:\{resources.launcher\} )?dflop ([a-z-]+) ', rule)
            tracked[rule.partition(":")[0]] = commands, re.findall(r'code_digest\("([a-z-]+)"\)', rule)
    # This rule runs no command. It writes down the settings of `profile-costs`, and so tracks the code of that one.
    assert tracked.pop("cost_settings") == ([], ["profile-costs"])
    assert all(len(commands) == 1 and commands == digests for commands, digests in tracked.values()), tracked
    assert {command for commands, _ in tracked.values() for command in commands} == COMMANDS.keys()
