"""Links in Markdown files that are read outside of the built pages lead somewhere; `make docs` looks at the others."""

import re
from pathlib import Path

import pytest

from dflop.base.commands import ROOMS

REPOSITORY = Path(__file__).parents[2]
FILES = ("README.md", "CONTRIBUTING.md", "config/README.md", "dflop/models/README.md")


def anchors_of(page: Path) -> set[str]:
    """Of each heading, as GitHub names it."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", FILES)
def test_every_link_to_a_file_leads_to_one(name):
    page = REPOSITORY / name
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), f"{name} links to {path}"
        assert not anchor or anchor in anchors_of(target), f"{name} links to {path}#{anchor}"


def test_every_place_where_something_is_decided_exists():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## Where is it decided?")[1].split("##")[0]
    places = re.findall(r"`(dflop/[^`]+)`", table)
    assert len(places) >= 20
    assert [place for place in places if not (REPOSITORY / place).exists()] == []


def test_every_room_has_its_question():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## Where things are")[1].split("##")[0]
    named = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"\w+", " ".join(named))) == sorted([*ROOMS, "cli"])
