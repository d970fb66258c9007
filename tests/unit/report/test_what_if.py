"""The what-if page shows the rows of its table, and says where it has none."""

import json
import sys
from pathlib import Path

import pytest
from browser import LAPTOP, PHONE, SCHEMES, browser, find_chromium, overflow

DOCS = Path(__file__).parents[3] / "docs"
ROWS = json.loads((DOCS / "what-if.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        from what_if import write_page
    path = tmp_path_factory.mktemp("page") / "what-if.html"
    write_page([*ROWS, ROWS[0] | {"mix": "</script> odd", "devices": 7, "sampler_s": None}], path)
    sys.modules.pop("what_if")
    return path


@pytest.fixture(scope="module")
def tab():
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("there is no Chromium; install Debian's package `chromium`, or name one in CHROMIUM")
    with browser(chromium) as tab:
        yield tab


def choose(tab, **values: object) -> str:
    for name, value in values.items():
        tab.value_of(f"asked.elements[{json.dumps(name)}].value = {json.dumps(str(value))}")
    tab.value_of("asked.dispatchEvent(new Event('input'))")
    return tab.value_of("document.body.innerText")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_it_fits_its_window_and_fetches_nothing(tab, page, width, scheme):
    tab.open(page, width, scheme)
    assert tab.problems == []
    assert tab.requests == [page.absolute().as_uri()]
    assert overflow(tab) == []


def test_each_row_of_the_table_is_an_answer(tab, page):
    tab.open(page, LAPTOP, "light")
    for row in ROWS:
        said = choose(tab, **{key: row[key] for key in ("model", "card", "devices", "mix")}, price=3)
        assert row["layout"] in said
        assert f"{row['memory_gib']:g} GiB" in said
        hours = 1e6 / 8 * row["step_s"] / 3600
        assert f"{round(hours):,} device-hours" in said


def test_what_was_not_searched_is_said_and_what_does_not_fit_too(tab, page):
    tab.open(page, LAPTOP, "light")
    odd = {"model": ROWS[0]["model"], "card": ROWS[0]["card"], "mix": "</script> odd"}
    assert "sampler: does not fit" in choose(tab, **odd, devices=7)
    assert "not searched" in choose(tab, **odd, devices=ROWS[0]["devices"])
