"""The page of a run: whole in itself, true of the run, and readable on laptops and phones, light and dark."""

import json
import re
import shutil

import pytest
import yaml
from browser import LAPTOP, PHONE, SCHEMES, browser, find_chromium, overflow
from reported_runs import SMALL, SUMMARY, make_run, report_of

from dflop.planning import TODAY

SECTIONS = ["data", "costs", "plan", "memory", "step", "training", "time", "savings", "made"]


def test_all_sections_stand_in_one_page_that_fetches_nothing(usual):
    page = page_of(usual)
    assert re.findall(r'<section id="(\w+)">', page) == SECTIONS
    assert re.findall(r'href="#(\w+)"', page) == SECTIONS
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert "https://" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


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
    figures = [float(number) for number in re.findall(r"([\d.]+) of 4 GiB: ", said)]
    parts = [
        sum(float(number) for number in re.findall(r" ([\d.e-]+)(?:,|$)", own + ","))
        for own in re.findall(r" of 4 GiB: ([^·]*?allocator [\d.e-]+)", said)
    ]
    assert parts == pytest.approx(figures, rel=0.02)


def test_the_panels_of_the_timeline_are_of_one_batch_and_the_measured_one_of_the_drawn_assignment(usual):
    timeline = numbers_of(page_of(usual))["timeline"]
    scheduled, random, measured = timeline["panels"]
    assert [panel["measured"] for panel in timeline["panels"]] == [False, False, True]
    assert "not the assignment" not in measured["title"]
    assert [panel["has_loads"] for panel in timeline["panels"]] == [True, False, True]
    # The measured one took one and a half times as long, in everything.
    assert len(scheduled["boxes"]) == len(measured["boxes"]) == len(random["boxes"])
    for predicted_box, measured_box in zip(sorted(scheduled["boxes"]), sorted(measured["boxes"]), strict=True):
        assert predicted_box[:5] == measured_box[:5]
        assert measured_box[6] == pytest.approx(1.5 * predicted_box[6], abs=1e-5)
    assert sum(load[0] for key, load in timeline["loads"].items() if key.startswith("llm/")) == 16


def test_a_measured_step_of_another_assignment_is_said_to_be_one(odd):
    measured = numbers_of(page_of(odd))["timeline"]["panels"][-1]
    assert "not the assignment drawn above" in measured["title"]
    assert not measured["has_loads"]


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
        "costs.svg",
        "plans.svg",
        "timeline.svg",
        "summary.json",
    ]
    assert re.findall(r'<section id="(\w+)">', page) == [name for name in SECTIONS if name not in ("training", "time")]
    assert "Not trained yet; predicted, it is: bound by llm compute" in words(page)
    assert "Over an epoch of 60 samples, 4 steps, this plan takes" in words_of(page, "savings")
    assert len(numbers_of(page)["timeline"]["panels"]) == 2
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
    page = page_of(report_of(folder, SMALL))
    assert "<img" not in page
    assert "&lt;/script&gt;&lt;img src=x" in page


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


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_the_timeline_is_drawn_zoomed_and_read_box_by_box(tab, usual, width):
    tab.open(usual.folder / "report/index.html", width, "light")
    assert tab.value_of('document.querySelectorAll("#timeline canvas").length') == 3
    whole = tab.value_of('document.querySelector("#extent").textContent')
    tab.press('[data-zoom="in"]')
    assert tab.value_of('document.querySelector("#extent").textContent') != whole
    tab.press('[data-zoom="all"]')
    assert tab.value_of('document.querySelector("#extent").textContent') == whole
    tab.value_of('document.querySelector("#timeline canvas").scrollIntoView({block: "center", behavior: "instant"})')
    left, top, size = tab.value_of(
        '(area => [area.left, area.top, area.width])(document.querySelector("canvas").getBoundingClientRect())'
    )
    tips = []
    for share in (0.4, 0.5, 0.6, 0.7):
        tab.point_at(left + share * size, top + 12)
        tips.append(tab.value_of('document.querySelector("#tip").innerText'))
    wanted = r"(vision|llm) (forward|backward) of microbatch \d\n.*s, from .*\n\d+ samples?"
    assert any(re.search(wanted, tip) for tip in tips), tips
    assert tab.problems == []


def page_of(reported) -> str:
    return (reported.folder / "report/index.html").read_text()


def words(page: str) -> str:
    """All that a person reads, without tags."""
    text = re.sub(r"<(style|script|svg).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+([.,;:])", r"\1", re.sub(r"\s+", " ", text)).replace("&#39;", "'").replace("&#34;", '"')


def words_of(page: str, section: str) -> str:
    return words(re.search(rf'<section id="{section}">.*?</section>', page, re.DOTALL)[0])


def numbers_of(page: str) -> dict:
    return json.loads(re.search(r'id="numbers">(.*?)</script>', page)[1])
