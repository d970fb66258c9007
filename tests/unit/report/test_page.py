"""The page of a run: whole in itself, true of the run, and readable on laptops and phones, light and dark."""

import csv
import io
import json
import re
import shutil

import pytest
import yaml
from browser import LAPTOP, PHONE, SCHEMES, browser, find_chromium, overflow
from reported_runs import SMALL, SUMMARY, make_run, report_of

from dflop.report.style import PALETTE
from dflop.search import TODAY

SECTIONS = ["data", "costs", "plan", "memory", "step", "training", "time", "savings", "made"]
BOX = ("worker", "what", "microbatch", "computes", "holds")


def test_all_sections_stand_in_one_page_that_fetches_nothing(usual):
    page = re.sub(r'<script id="library">.*?</script>', "", page_of(usual), flags=re.DOTALL)
    assert re.findall(r'<section id="(\w+)">', page) == SECTIONS
    assert re.findall(r'href="#(\w+)"', page) == SECTIONS
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert "https://" not in page
    assert "http://" not in page


def test_what_the_data_looks_like_and_what_was_refused_is_said(usual):
    said = words_of(page_of(usual), "data")
    assert "60 samples of 1 source, read from media headers" in said
    assert "3 of 63 records cannot be used" in said
    assert "missing_media 2 train, row 60: made up" in said
    assert "Every sample fits" in said


def test_the_chosen_plan_stands_among_the_others_once(usual):
    said = words_of(page_of(usual), "plan")
    assert "Encoder and LLM compute on devices of their own. It is short." in said
    assert "217 layouts were looked at, 5 priced to the end" in said
    assert said.count("· chosen") == 1
    assert "The chosen one is bound by llm compute" in said


def test_memory_is_stacked_by_category_up_to_what_a_device_has(usual):
    said = words_of(page_of(usual), "memory")
    assert re.search(r"The fullest device \(\w+\)|the fullest device \(\w+\) is predicted to hold", said)
    for category in ("parameters", "gradients", "optimizer", "activations", "process", "allocator"):
        assert category in said
    for row in re.findall(r"(?:vision|llm)((?: [\d.e-]+){7})", said):
        total, *parts = map(float, row.split())
        assert sum(parts) == pytest.approx(total, rel=0.02)
    bars, limit = views_of(page_of(usual))["memory-0"]["layer"]
    assert {row["device"] for row in rows_of(bars)} == {"vision", "llm"}
    assert limit["data"]["values"] == [{"limit": 4.0}]


def test_the_panels_of_the_timeline_are_of_one_batch_and_the_measured_one_of_the_drawn_assignment(usual):
    scheduled, random, measured = timeline_of(usual)
    titles = re.findall(r"<figcaption>((?:lpt|random), \w+: )", page_of(usual))
    assert titles == ["lpt, predicted: ", "random, predicted: ", "lpt, measured: "]
    assert "not the assignment" not in page_of(usual)
    assert len(scheduled) == len(measured) == len(random)
    # The measured one took one and a half times as long, in everything.
    for predicted_box, measured_box in zip(scheduled, measured, strict=True):
        assert [predicted_box[name] for name in BOX] == [measured_box[name] for name in BOX]
        assert float(measured_box["end_s"]) == pytest.approx(1.5 * float(predicted_box["end_s"]), rel=1e-5)
    samples = {box["microbatch"]: box["holds"] for box in scheduled if box["what"] == "llm forward"}
    assert sum(int(words.split()[0]) for words in samples.values()) == 16


def test_a_measured_step_of_another_assignment_is_said_to_be_one(odd):
    assert "not the assignment drawn above" in page_of(odd)
    scheduled, _, measured = timeline_of(odd)
    assert all(box["holds"] for box in scheduled if box["what"].startswith("llm"))
    assert not any(box["holds"] for box in measured)


def test_savings_are_predicted_ratios_of_measured_hours_with_their_range(usual):
    page = page_of(usual)
    said = words_of(page, "savings")
    assert "without this plan a step takes 1.50x as long (monolithic, random batches)" in said
    assert "1.25x to 1.75x" in said
    assert "a rule nothing of the kind fits into memory" in said
    assert "Set cluster.gpu_hour_cost to see money" in said
    assert "Megatron-style instead predicted 1.50x as long" in words(page)


def test_todays_layout_comes_first_in_what_is_saved(usual, tmp_path):
    folder = shutil.copytree(usual.folder, tmp_path / "run")
    plan = yaml.safe_load((folder / "plan.yaml").read_text())
    plan["baselines"].insert(0, plan["baselines"][0] | {"name": TODAY, "step_s": 0.6})
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    said = words_of(page_of(report_of(folder, SMALL, gpu_hour_cost=2.5)), "savings")
    assert "today's layout would take 1.20x as long as this plan" in said
    assert f"{TODAY} monolithic: all 0.600 s 1.20x" in said
    plan["baselines"][0] = {"name": TODAY, "why_not": "does not fit: it needs 90 GiB a device"}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    said = words_of(page_of(report_of(folder, SMALL)), "savings")
    assert f"{TODAY} does not fit: it needs 90 GiB a device" in said
    assert "without this plan a step takes 1.50x as long" in said


def test_money_is_hours_times_what_an_hour_costs(usual, tmp_path):
    folder = shutil.copytree(usual.folder, tmp_path / "run")
    said = words_of(page_of(report_of(folder, SMALL, gpu_hour_cost=2.5)), "savings")
    # Two devices for two hours, half as much again without the plan.
    assert "takes 4 device-hours, 10.00 at 2.50 an hour measured" in said
    assert re.search(r"monolithic: all 0\.750 s 1\.50x 1\.25x to 1\.75x 30% 2 1 to 3 5\.00", said)


def test_the_verdict_of_a_trained_run_is_what_its_seconds_say(usual, tmp_path):
    folder = shutil.copytree(usual.folder, tmp_path / "run")
    said = words(page_of(usual))
    assert (
        said.count("The loaders bound this run: rank 1 waited 20% of each step for data; raise train.loader_workers.")
        == 2
    )
    assert "computing 12%, gradient sync 12%" in words_of(page_of(usual), "time")
    assert "takes 1.50x its prediction at the median" in words_of(page_of(usual), "time")
    (folder / "train/summary.json").write_text(json.dumps(SUMMARY | {"time_split": None}))
    said = words(page_of(report_of(folder, SMALL)))
    assert "What bounds this run is not known: no step after the warm-up was observed" in said


def test_a_run_that_is_only_planned_has_a_page_without_training(write_made_up_costs, tmp_path):
    folder = make_run(tmp_path / "run", write_made_up_costs)
    shutil.rmtree(folder / "train")
    (folder / "schedule.parquet").unlink()
    reported = report_of(folder, SMALL)
    page = page_of(reported)
    assert [path.name for path in reported.paths] == [
        "index.html",
        *(f"{name}.svg" for name in ("costs", "memory", "plans", "savings", "timeline")),
        "summary.json",
    ]
    assert re.findall(r'<section id="(\w+)">', page) == [name for name in SECTIONS if name not in ("training", "time")]
    assert "Not trained yet; predicted, it is: bound by llm compute" in words(page)
    assert "Over an epoch of 60 samples, 4 steps, this plan takes" in words_of(page, "savings")
    assert len(timeline_of(reported)) == 2
    assert json.loads((folder / "report/summary.json").read_text())["training"] is None


def test_a_plan_written_by_hand_has_a_page_too(usual, tmp_path):
    folder = shutil.copytree(usual.folder, tmp_path / "run")
    (folder / "plan.yaml").write_text(yaml.safe_dump({"plan": SMALL.to_dict()}))
    page = page_of(report_of(folder, SMALL))
    assert "The plan was written by hand." in words_of(page, "plan")
    assert '<section id="savings">' not in page


def test_names_from_the_data_are_text_whatever_is_in_them(write_made_up_costs, tmp_path):
    folder = make_run(
        tmp_path / "run", write_made_up_costs, num_rejects=1, detail="</script><img src=x onerror=alert(1)>"
    )
    reported = report_of(folder, SMALL)
    page = page_of(reported)
    assert "<img" not in re.sub(r'<script id="library">.*?</script>', "", page, flags=re.DOTALL)
    assert "&lt;/script&gt;&lt;img src=x" in page
    assert "<img" not in (folder / "report/shapes.svg").read_text()


@pytest.fixture(scope="module")
def tab():
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("there is no Chromium; install Debian's package `chromium`, or name one in CHROMIUM")
    with browser(chromium) as tab:
        yield tab


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [LAPTOP, PHONE])
@pytest.mark.parametrize("run", ["usual", "odd"])
def test_the_page_fits_its_window_says_nothing_on_the_console_and_fetches_nothing(tab, request, run, width, scheme):
    page = request.getfixturevalue(run).folder / "report/index.html"
    tab.open(page, width, scheme)
    assert tab.problems == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [page.absolute().as_uri()]
    assert overflow(tab) == []
    heights = tab.value_of('[...document.querySelectorAll("section")].map(own => own.getBoundingClientRect().height)')
    assert len(heights) == len(SECTIONS)
    assert min(heights) > 60
    background = tab.value_of("getComputedStyle(document.body).backgroundColor")
    channels = [int(number) for number in re.findall(r"\d+", background)]
    assert (sum(channels) > 3 * 128) == (scheme == "light")


@pytest.mark.parametrize("run", ["usual", "odd"])
def test_every_picture_is_drawn_in_the_width_and_the_colours_of_the_window(tab, request, run):
    page = request.getfixturevalue(run).folder / "report/index.html"
    for width, scheme in ((LAPTOP, "light"), (PHONE, "dark")):
        tab.open(page, width, scheme)
        drawn = tab.value_of(
            """[...document.querySelectorAll(".picture")].map(place => [place.id, place.clientWidth,
                 place.querySelector("svg, canvas").getBoundingClientRect().width])"""
        )
        assert {name for name, *_ in drawn} == views_of(page.read_text()).keys()
        assert all(abs(room - taken) < 2 for _, room, taken in drawn), drawn
        ink = PALETTE["ink"][scheme == "dark"]
        assert tab.value_of('document.querySelector("#training-0 .role-axis-label text").getAttribute("fill")') == ink


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_the_timeline_is_drawn_zoomed_and_read_box_by_box(tab, usual, width):
    tab.open(usual.folder / "report/index.html", width, "light")
    assert tab.value_of('document.querySelectorAll("#timeline canvas").length') == 3
    whole = extents(tab)
    assert len(set(whole)) == 1
    tab.press('[data-zoom="in"]')
    (zoomed,) = set(extents(tab))
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[0][1] - whole[0][0]) / 2)
    tab.press('[data-zoom="all"]')
    assert extents(tab) == whole
    tab.value_of('document.querySelector("#timeline canvas").scrollIntoView({block: "center", behavior: "instant"})')
    left, top, size = tab.value_of(
        '(area => [area.left, area.bottom - 60, area.width])(document.querySelector("canvas").getBoundingClientRect())'
    )
    tips = []
    for share in (0.4, 0.5, 0.6, 0.7):
        tab.point_at(left + share * size, top)
        tips.append(tab.value_of('document.querySelector("#vg-tooltip-element")?.innerText'))
    wanted = r"(vision|llm) (forward|backward) of microbatch \d\s+takes\s+.*s, from .*\s+holds\s+\d+ samples?"
    assert any(re.search(wanted, tip or "") for tip in tips), tips
    # The wheel scrolls the page; with Ctrl it zooms around what is pointed at.
    scrolls = """(ctrlKey => document.querySelector("canvas").dispatchEvent(new WheelEvent(
        "wheel", {ctrlKey, deltaY: -100, clientX: %f, clientY: %f, bubbles: true, cancelable: true})))"""
    scrolls %= (left + 0.5 * size, top)
    assert tab.value_of(f"{scrolls}(false)")
    assert extents(tab) == whole
    assert not tab.value_of(f"{scrolls}(true)")
    (zoomed,) = set(extents(tab))
    assert zoomed[1] - zoomed[0] < whole[0][1] - whole[0][0]
    assert tab.problems == []


def test_what_the_data_says_never_runs(tab, write_made_up_costs, tmp_path):
    script = "<img src=x onerror=\"document.title='ran'\">"
    folder = make_run(tmp_path / "run", write_made_up_costs, num_rejects=1, detail=script, source=script)
    report_of(folder, SMALL)
    tab.open(folder / "report/index.html", LAPTOP, "light")
    tab.value_of('document.querySelector("#shapes-0").scrollIntoView({block: "center", behavior: "instant"})')
    left, top = tab.value_of(
        '(area => [area.left, area.top])(document.querySelector("#shapes-0 .mark-rect path").getBoundingClientRect())'
    )
    tab.point_at(left + 1, top + 1)
    assert tab.value_of("document.title") != "ran"
    assert script in tab.value_of('document.querySelector("#data").innerText')
    assert tab.problems == []


def extents(tab) -> list[tuple[float, float]]:
    """The seconds that each panel of the timeline shows."""
    shown = tab.value_of(
        """Promise.all(Object.keys(pictures).filter(id => id.startsWith("timeline")).map(async id =>
             (await pictures[id].view.runAsync()).scale("x").domain()))"""
    )
    return [tuple(extent) for extent in shown]


def page_of(reported) -> str:
    return (reported.folder / "report/index.html").read_text()


def words(page: str) -> str:
    """All that a person reads, without tags."""
    text = re.sub(r"<(style|script|svg).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+([.,;:])", r"\1", re.sub(r"\s+", " ", text)).replace("&#39;", "'").replace("&#34;", '"')


def words_of(page: str, section: str) -> str:
    return words(re.search(rf'<section id="{section}">.*?</section>', page, re.DOTALL)[0])


def views_of(page: str) -> dict:
    return json.loads(re.search(r'id="views">(.*?)</script>', page)[1])


def rows_of(view: dict) -> list[dict[str, str]]:
    """The rows of a view's data."""
    return list(csv.DictReader(io.StringIO(view["data"]["values"])))


def timeline_of(reported) -> list[list[dict[str, str]]]:
    """The boxes of each panel."""
    panels = (view for name, view in views_of(page_of(reported)).items() if name.startswith("timeline"))
    return [sorted(rows_of(view), key=lambda box: [box[name] for name in BOX]) for view in panels]
