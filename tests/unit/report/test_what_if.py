"""The what-if page shows the rows of its table, and says where it has none."""

import json
import sys
from pathlib import Path

import pytest
from browser import LAPTOP, PHONE, SCHEMES, browser, find_chromium, overflow

DOCS = Path(__file__).parents[3] / "docs"
SAMPLER, RANDOM = "FSDP, dealt by dflop's sampler", "FSDP, random batches"
ROWS = json.loads((DOCS / "what-if.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        from what_if import write_page
    path = tmp_path_factory.mktemp("page") / "what-if.html"
    write_page(
        [*ROWS, ROWS[0] | {"mix": "</script> odd", "devices": 7, "systems": {SAMPLER: None, RANDOM: None}}], path
    )
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
        said = choose(tab, **{key: row[key] for key in ("model", "card", "devices", "mix")}, samples=2e6, price=3)
        for name, grid in row["plan"]["grids"].items():
            assert f"{name}: {grid['dp']} replica" in said
        assert f"{row['memory_gib']:g} GiB" in said
        hours = 2e6 / 8 * row["step_s"] / 3600
        assert f"{round(hours):,} device-hours; {round(3 * hours):,} at that price" in said
        assert f"{row['systems'][RANDOM] / row['step_s']:.2f} times dflop's step" in said
        assert f"{round(8 * row['tokens'] / row['step_s']):,} of the LLM's tokens a second and device" in said
        for name, step_s in row["systems"].items():
            assert f"{name}: {'does not fit' if step_s is None else ''}" in said
        assert f"cluster.device_model={row['card']}" in said


def test_what_was_not_searched_is_said_and_what_does_not_fit_too(tab, page):
    tab.open(page, LAPTOP, "light")
    odd = {"model": ROWS[0]["model"], "card": ROWS[0]["card"], "mix": "</script> odd"}
    said = choose(tab, **odd, devices=7)
    assert f"{SAMPLER}: does not fit" in said
    assert "FSDP with random batches does not fit into memory" in said
    assert "Not searched" in choose(tab, **odd, devices=ROWS[0]["devices"])
