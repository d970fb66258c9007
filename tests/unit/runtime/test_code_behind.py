"""What counts as the code behind a function, on a made-up package, and how its digest follows changes."""

from pathlib import Path
from textwrap import dedent

import pytest

from dflop.runtime.code_behind import CodeBehind

FILES = {
    "house/__init__.py": "",
    "house/cli.py": """
        from house.rooms import build, Door as Way, walls as structure

        def first():
            '''Builds.'''
            from house.late import finish
            return finish(build(LIMIT))

        def second(way: Way):
            return structure.paint("red")

        def third():
            return start("house.child", "rules.yaml", "script.py")

        def fourth(room):
            return start(f"house.rooms.{room}", "house.rooms.*.build")

        def start(*command):
            return command

        LIMIT = 3
    """,
    "house/rooms/__init__.py": """
        from house.rooms.doors import Door
        from house.rooms.floors import build
        from house.rooms import walls
    """,
    "house/rooms/doors.py": "class Door: pass",
    "house/rooms/floors.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from house.rooms.doors import Door
        HEIGHTS = {}
        HEIGHTS["ground"] = 2.5
        def build(number: "Door") -> "Door":
            return HEIGHTS, number
        def unused(): pass
    """,
    "house/rooms/walls.py": """
        def paint(colour): return mix(colour)
        def mix(colour): return colour
        def tear_down(): pass
    """,
    "house/late.py": "def finish(built): return built",
    "house/child.py": """
        def main(): return help_out()
        def help_out(): pass
        if __name__ == "__main__":
            main()
    """,
    "house/script.py": "def run(): pass",
    "house/rules.yaml": "a: 1",
}


@pytest.fixture
def house(tmp_path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))
    return tmp_path / "house"


def behind(house: Path, function: str, *stops: str) -> set[str]:
    """The definitions and files behind a function of `cli`, without what every module brings."""
    definitions, files = CodeBehind(house, frozenset(stops)).reach(f"house.cli.{function}")
    named = {f"{module}.{name}".removeprefix("house.") for module, name in definitions if name not in ("", "*")}
    return named | {path.name for path in files}


def test_names_are_followed_through_packages_and_late_imports_to_who_defines_them(house):
    assert behind(house, "first") == {
        "cli.first",
        "cli.LIMIT",
        "late.finish",
        "rooms.floors.build",
        "rooms.floors.HEIGHTS",
    }


def test_of_a_module_only_what_is_named_counts_and_annotations_do_not(house):
    assert behind(house, "second") == {"cli.second", "rooms.walls.paint", "rooms.walls.mix"}


def test_modules_scripts_and_data_that_a_text_names_count_whole(house):
    assert behind(house, "third") == {
        *("cli.third", "cli.start", "child.main", "child.help_out", "child.__main__", "script.run", "rules.yaml"),
    }


def test_a_text_with_a_star_names_what_all_modules_define_that_fit(house):
    (house / "rooms/roof.py").write_text("def build(): return 2")
    assert behind(house, "fourth") == {
        *("cli.fourth", "cli.start", "rooms.floors.build", "rooms.floors.HEIGHTS", "rooms.roof.build")
    }


def test_what_is_stopped_at_is_not_followed(house):
    assert behind(house, "first", "house.late", "house.rooms.floors.HEIGHTS") == {
        *("cli.first", "cli.LIMIT", "rooms.floors.build"),
    }


@pytest.mark.parametrize(
    ("file", "before", "after", "changes"),
    [
        ("rooms/floors.py", "return HEIGHTS, number", "return number", True),
        ("rooms/floors.py", '["ground"] = 2.5', '["ground"] = 2.6', True),
        ("cli.py", "LIMIT = 3", "LIMIT = 4", True),
        ("late.py", "def finish(built): return built", "from house.child import main as finish", True),
        ("rooms/floors.py", "def unused(): pass", "def unused(): return 1", False),
        ("rooms/walls.py", "return mix(colour)", "return colour", False),
        ("cli.py", "'''Builds.'''", "'''Builds a house.'''", False),
        ("cli.py", "LIMIT = 3", "LIMIT  =  3  # storeys", False),
        ("rooms/floors.py", 'number: "Door"', "number: int", False),
        ("rules.yaml", "a: 1", "a: 2", False),
    ],
)
def test_the_digest_changes_with_the_code_behind_the_function_and_with_nothing_else(
    house, file, before, after, changes
):
    digest = CodeBehind(house).digest("house.cli.first")
    path = house / file
    path.write_text(path.read_text().replace(before, after))
    assert (CodeBehind(house).digest("house.cli.first") != digest) == changes


@pytest.mark.parametrize(("file", "text"), [("rules.yaml", "a: 2"), ("child.py", "def main(): return 1")])
def test_the_digest_changes_with_data_and_processes(house, file, text):
    digest = CodeBehind(house).digest("house.cli.third")
    (house / file).write_text(text)
    assert CodeBehind(house).digest("house.cli.third") != digest
