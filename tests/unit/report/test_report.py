"""The report holds what a run left behind, drawn the same every time, for large, small and odd runs alike."""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest
from reported_runs import (
    SMALL,
    SUMMARY,
    WIDE,
    config_of,
    make_candidates,
    make_run,
    make_shapes,
    report_of,
    scheduler_of,
)

from dflop.base import UserError
from dflop.plan import Grid, Plan
from dflop.report import charts, plot_shapes, write_report
from dflop.report.boxes import StepPanel, measured_boxes, predicted_boxes
from dflop.report.charts.plans import draw_plans, plans_finding
from dflop.report.charts.shapes import draw_shapes
from dflop.report.charts.time_split import draw_time_split
from dflop.report.charts.timeline import draw_timeline
from dflop.report.charts.training import draw_training
from dflop.report.picture import Picture, write_picture
from dflop.report.run import read_run
from dflop.report.schedules import price_preview, replay
from dflop.step import workers_of
from dflop.store import (
    read_table,
)
from dflop.train.observations import SCHEDULE_FILE
from dflop.train.step_seconds import PARTS, seconds_frame

CHARTS = ("costs", "memory", "plans", "savings", "time_split", "timeline", "training")
NAMES = ["index.html", *(f"{name}.svg" for name in CHARTS), "summary.json"]


def test_the_report_of_a_run_is_a_page_its_pictures_and_a_summary(usual):
    folder, paths = usual
    assert paths == [folder / "report" / name for name in NAMES]
    assert sorted(path.name for path in (folder / "report").iterdir()) == sorted([*NAMES, "shapes.svg"])
    for path in (folder / "report").glob("*.svg"):
        assert texts(path), path


def test_the_same_run_gives_the_same_bytes(usual):
    again = report_of(usual.folder, SMALL, "again")
    for before in (usual.folder / "report").iterdir():
        assert before.read_bytes() == (again.folder / "again" / before.name).read_bytes(), before.name


def test_the_summary_holds_the_figures_of_every_stage(usual):
    summary = json.loads(usual.paths[-1].read_text())
    stages = ["run", "data", "costs", "plan", "schedule", "one_step", "training"]
    assert list(summary) == [*stages, "training_is_of_this_plan"]
    assert summary["data"]["num_samples"] == 60
    assert summary["data"]["rejects"] == {"missing_media": 2, "too_long": 1}
    assert summary["plan"]["plan"] == str(SMALL)
    assert summary["schedule"]["policy"] == "lpt"
    assert summary["schedule"]["num_batches"] == 3
    assert summary["schedule"]["times_the_lower_bound"] >= 1
    assert summary["one_step"]["measured_over_predicted"] == pytest.approx(1.5)
    assert summary["training"].keys() == SUMMARY.keys()


def test_training_with_other_costs_than_those_that_are_drawn_is_said(usual, tmp_path, capsys):
    folder = shutil.copytree(usual.folder, tmp_path / "run")
    (folder / "train/summary.json").write_text(json.dumps(SUMMARY | {"prices": "another table's"}))
    paths = report_of(folder, SMALL).paths
    assert "was trained with other costs or another plan" in capsys.readouterr().err
    said = json.loads(paths[-1].read_text())
    assert said["training_is_of_this_plan"] is False
    assert "measured_s" not in said["one_step"]  # nothing of that run stands beside these predictions
    timeline = next(path for path in paths if path.name == "timeline.svg").read_text()
    assert "the run was trained by another plan or other costs" in timeline
    assert json.loads(usual.paths[-1].read_text())["training_is_of_this_plan"] is True


def test_a_chart_is_added_by_one_file(usual, tmp_path, monkeypatch):
    (tmp_path / "tokens.py").write_text(
        "import polars as pl\n"
        "from dflop.report.picture import Panel, Picture, layer, number, rows\n"
        "def draw(facts):\n"
        "    tokens = rows(facts.run.samples.select('text_tokens', 'llm_tokens'))\n"
        "    view = layer('point', data=tokens, x=number('text_tokens'), y=number('llm_tokens'))\n"
        "    panel = Panel(title='Text in all tokens', view=view, height=200)\n"
        "    return Picture(section='data', finding='Some is text', note='', panels=[panel])\n"
    )
    monkeypatch.setattr(charts, "__path__", [*charts.__path__, str(tmp_path)])
    reported = report_of(usual.folder, SMALL, "with_another")
    assert "tokens.svg" in [path.name for path in reported.paths]
    said = texts(usual.folder / "with_another/tokens.svg")
    assert "Some is text | Text in all tokens" in said
    data = re.search(r'<section id="data">.*?</section>', reported.paths[0].read_text(), re.DOTALL)[0]
    assert "Text in all tokens" in data
    assert 'id="tokens-0"' in data


def test_a_picture_has_the_colours_of_a_light_page_and_one_name_for_each_clip(usual):
    for path in (usual.folder / "report").glob("*.svg"):
        picture = path.read_text()
        assert "var(" not in picture
        names = re.findall(r'<clipPath id="(\w+)"', picture)
        assert len(set(names)) == len(names)
        assert set(re.findall(r"url\(#(\w+)\)", picture)) == set(names)


def test_the_headline_says_that_samples_differ_where_they_do(usual):
    said = texts(usual.folder / "report" / "shapes.svg")
    assert re.search(
        r"Samples differ: the 95th percentile has [1-9]\.\dx the LLM tokens of the median, and a tenth", said
    )
    samples = read_table(usual.folder / "shapes.duckdb", "samples", made_by="merge-shapes")
    rejects = read_table(usual.folder / "shapes.duckdb", "rejects", made_by="merge-shapes")
    picture = draw_shapes(samples.with_columns(llm_tokens=pl.lit(100, pl.Int32)), rejects)
    assert "Samples are much alike: the 95th percentile has 1.0x the LLM tokens of the median, but a tenth" in words(
        picture
    )


def test_samples_of_one_item_each_are_drawn_and_their_sources_keep_their_names(usual, tmp_path):
    samples = read_table(usual.folder / "shapes.duckdb", "samples", made_by="merge-shapes")
    rejects = read_table(usual.folder / "shapes.duckdb", "rejects", made_by="merge-shapes")[:0]
    source = pl.when(pl.col("row") < 30).then(pl.lit("clip97")).otherwise(pl.lit("train"))
    alike = samples.with_columns(num_items=pl.lit(1, pl.Int32), source=source)
    write_picture(draw_shapes(alike, rejects), tmp_path / "shapes.svg")
    assert "from clip97" in texts(tmp_path / "shapes.svg")


def test_samples_are_drawn_by_modality_and_by_source_in_what_they_have(usual):
    samples = read_table(usual.folder / "shapes.duckdb", "samples", made_by="merge-shapes")
    rejects = read_table(usual.folder / "shapes.duckdb", "rejects", made_by="merge-shapes")[:0]
    picture = draw_shapes(samples, rejects)
    said = words(picture)
    assert "vision tokens a sample" in said
    assert "seconds of sound" not in said
    assert "from " not in said.replace("from headers", "")
    with_sound = samples.with_columns(
        audio_s=pl.when(pl.col("modality") == "text").then(2.5).otherwise(0.0),
        source=pl.when(pl.col("row") < 40).then(pl.lit("train")).otherwise(pl.lit("a $very$ long name of a source")),
    )
    picture = draw_shapes(with_sound, rejects)
    said = words(picture)
    for part in (
        "seconds of sound a sample",
        "p50 2.5 · p95 2.5",
        "from train (40): ",
        "from a $very$ long name… (20): ",
    ):
        assert part in said


def test_names_that_no_picture_can_hold_are_drawn_all_the_same(tmp_path):
    make_shapes(tmp_path, ("image",), num_rejects=1, detail="a\0b\x1b $x$ is not a file" + " of any kind" * 30)
    plot_shapes(tmp_path / "shapes.duckdb", tmp_path / "shapes.svg")
    assert "train, row 60: a?b? $x$ is not a file of any kind" in texts(tmp_path / "shapes.svg")


def test_data_of_which_nothing_can_be_used_is_drawn_too(tmp_path):
    make_shapes(tmp_path, ("image",), num_samples=0, num_rejects=3)
    plot_shapes(tmp_path / "shapes.duckdb", tmp_path / "shapes.svg")
    said = texts(tmp_path / "shapes.svg")
    assert "No record can be used" in said
    assert "3 records rejected" in said


def test_a_wide_run_of_three_steps_on_text_without_optional_columns_is_drawn(odd):
    assert [path.name for path in odd.paths] == NAMES
    said = {path.stem: texts(path) for path in (odd.folder / "report").glob("*.svg")}
    assert "no record rejected" in said["shapes"]
    assert "No sample has encoder items" in said["shapes"]
    for label in ("vision · dp 1", "llm stage 0 · dp 2", "llm stage 1 · dp 2"):
        assert said["timeline"].count(label) == 3, label
    summary = json.loads(odd.paths[-1].read_text())
    assert summary["data"]["correlation_items_llm_tokens"] is None


def test_the_only_plan_that_fits_is_drawn():
    picture = draw_plans(make_candidates(SMALL, 1), SMALL, memory_gib=4)
    assert "One plan fits" in words(picture)


def test_of_many_plans_the_best_are_drawn_and_the_chosen_one_is_marked():
    picture = draw_plans(make_candidates(SMALL, 30), SMALL, memory_gib=4)
    said = words(picture)
    assert "Of 30 plans that were priced the chosen one is predicted" in said
    assert said.count("· chosen") == 1
    assert "The best 12 of 30 are drawn" in said


def test_a_chosen_plan_far_behind_the_best_is_drawn_last_and_marked():
    candidates = make_candidates(SMALL, 30)
    behind = pl.concat([candidates[1:], candidates[:1]]).with_columns(
        rank=pl.int_range(1, 31), step_s=pl.int_range(1, 31) / 10
    )
    picture = draw_plans(behind, SMALL, memory_gib=4)
    said = words(picture)
    assert said.count("· chosen") == 1
    assert "The chosen plan is predicted to take 30.00x as long as the fastest" in said
    assert "The chosen plan comes last" in said


@pytest.mark.parametrize(
    ("shortest_s", "said"),
    [
        (0.995, "; of the plans priced within 3 % of that, it takes least once batches are scheduled"),
        (0.5, "2.00x as long as the fastest"),
    ],
)
def test_a_chosen_plan_that_is_not_the_fastest_is_said_to_be_so_for_the_reason_that_holds(shortest_s, said):
    chosen, *others = make_candidates(SMALL, 3).sort("rank").iter_slices(1)
    first = others[0].with_columns(step_s=pl.lit(shortest_s))
    listed = pl.concat([first, chosen.with_columns(step_s=pl.lit(1.0)), others[1].with_columns(step_s=pl.lit(3.0))])
    finding = plans_finding(listed.with_columns(rank=pl.int_range(1, 4)), SMALL)
    assert finding.endswith(said)


def test_a_plan_of_hundreds_of_workers_shows_some_replicas_of_every_stage():
    plan = Plan(
        placement="disjoint",
        grids=(Grid(module="vision", num_ranks=40), Grid(module="llm", num_ranks=120, pp=4, rank_offset=40)),
        num_microbatches=8,
    )
    boxes = measured_boxes(plan, pl.DataFrame([observation(index) for index in range(2)]))
    picture = draw_timeline([StepPanel("measured", boxes, 1.0)], plan, "a step")
    assert "(20 of 160 workers)" in words(picture)


@pytest.mark.parametrize("num_steps", [1, 3, 12, 4000])
def test_training_is_drawn_however_long_it_ran(num_steps):
    steps = np.arange(num_steps)
    metrics = pl.DataFrame(
        {"step": steps, "loss": 5 / (steps + 1), "num_tokens": 1000 + steps, "step_s": 0.5 + 9.0 * (steps == 0)}
    ).with_columns(pipeline_s=pl.col("step_s") * 0.9, predicted_step_s=0.25, idle=0.2)
    picture = draw_training(metrics)
    said = words(picture)
    assert ("step 0: " in said) == (num_steps > 2)  # the slow first step is told, not drawn
    assert f"{num_steps:,} steps: a step takes" in said
    assert ("is the mean of 7 steps" in said) == (num_steps == 4000)
    assert ("median of" in said) == (num_steps > 20)


@pytest.mark.parametrize(("num_ranks", "drawn"), [(1, 1), (2, 2), (100, 24)])
def test_where_the_time_went_is_drawn_for_the_ranks_that_others_wait_for(num_ranks, drawn):
    parts = np.full((num_ranks, len(PARTS)), 0.1)
    frame = pl.concat([seconds_frame(step, parts, 1.0, warmup=False) for step in range(3)])
    picture = draw_time_split(frame, {0: "rank 0 (vision stage 0)"}, "The loaders bound this run: raise them")
    said = words(picture)
    assert "The loaders bound this run: raise them" in said
    assert "seconds of the mean step, 1.00 s (measured)" in said
    assert said.count("10%") == drawn * len(PARTS)
    assert ("Of 100 ranks those 24 are drawn" in said) == (num_ranks > drawn)


def test_a_missing_artifact_names_the_command_that_makes_it(write_made_up_costs, tmp_path):
    make_run(tmp_path, write_made_up_costs)
    (tmp_path / "candidates.parquet").unlink()
    with pytest.raises(UserError, match=r"candidates\.parquet does not exist; make it with `dflop plan`"):
        write_report(config_of(SMALL), tmp_path, tmp_path / "report")
    assert not (tmp_path / "report").exists()


@pytest.fixture(scope="module")
def run_to_damage(write_made_up_costs, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("damaged"), write_made_up_costs)


@pytest.mark.parametrize("damage", [lambda content: bytes(255 - byte for byte in content), lambda _: b""])
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("candidates.parquet", "plan"),
        ("plan.yaml", "plan"),
        ("schedule.parquet", "schedule"),
        ("shapes.duckdb", "merge-shapes"),
        ("costs.duckdb", "fit-costs"),
        ("train/metrics.jsonl", "train"),
        ("train/summary.json", "train"),
        ("train/observations.duckdb", "train"),
    ],
)
def test_a_damaged_artifact_is_one_line_with_the_command_that_makes_it(run_to_damage, name, command, damage):
    path = run_to_damage / name
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    try:
        with pytest.raises(UserError, match=rf"^\S*{name}\b.*`dflop {command}`") as caught:
            read_run(run_to_damage)
    finally:
        path.write_bytes(whole)
    assert "\n" not in str(caught.value)


def test_a_damaged_schedule_of_a_step_is_moved_aside(run_to_damage, capsys):
    path = run_to_damage / "train/observations" / SCHEDULE_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    assert read_run(run_to_damage).trained.schedule is None
    assert f"{path}: it is not as it was written" in capsys.readouterr().err
    path.write_bytes(whole)
    assert read_run(run_to_damage).trained.schedule is not None


def test_a_preview_of_other_data_is_refused(usual):
    preview = pl.read_parquet(usual.folder / "schedule.parquet").with_columns(pl.col("sample_id") + "-old")
    with pytest.raises(UserError, match=r"-old', which is not in shapes\.duckdb"):
        price_preview(scheduler_of(usual.folder, SMALL), preview, usual.folder / "schedule.parquet")


@pytest.mark.parametrize(("name", "plan"), [("usual", SMALL), ("odd", WIDE)])
def test_the_preview_is_priced_as_the_scheduler_priced_it(name, plan, request):
    folder = request.getfixturevalue(name).folder
    scheduler = scheduler_of(folder, plan)
    prices = price_preview(scheduler, pl.read_parquet(folder / "schedule.parquet"), folder / "schedule.parquet")
    schedules = [scheduler.schedule(step) for step in range(3)]
    assert prices.step_s == pytest.approx(np.mean([schedule.step_s for schedule in schedules]))
    assert prices.idle == pytest.approx(np.mean([schedule.idle for schedule in schedules]))
    assert prices.lower_bound_s == pytest.approx(np.mean([schedule.lower_bound_s for schedule in schedules]))
    held = [max(scheduler.pricer.memory_bytes(schedule.shapes, schedule.assignment).values()) for schedule in schedules]
    assert prices.memory_bytes == pytest.approx(max(held))


@pytest.mark.parametrize(("name", "plan"), [("usual", SMALL), ("odd", WIDE)])
def test_predicted_boxes_fill_the_step_without_overlap(name, plan, request):
    scheduler = scheduler_of(request.getfixturevalue(name).folder, plan)
    schedule = scheduler.schedule(0)
    _, timeline = replay(scheduler, schedule)
    boxes = predicted_boxes(plan, timeline)
    assert boxes["end_s"].max() == pytest.approx(schedule.step_s)
    for _, frame in boxes.sort("start_s").group_by("worker"):
        assert (frame["start_s"][1:] >= frame["end_s"][:-1] - 1e-12).all()
    busy_s = (boxes["end_s"] - boxes["start_s"]).sum()
    assert 1 - busy_s / (len(workers_of(plan)) * schedule.step_s) == pytest.approx(schedule.idle)


def test_measured_boxes_take_one_of_the_ranks_that_act_as_one_worker():
    vision, llm = Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=2, tp=2, rank_offset=1)
    plan = Plan(placement="disjoint", grids=(vision, llm), num_microbatches=4)
    boxes = measured_boxes(plan, pl.DataFrame([observation(rank, start_s=0.5 * rank) for rank in (1, 2)]))
    assert boxes.select("worker", "start_s", "end_s").rows() == [(1, 0.5, 1.5)]


def test_what_several_workers_compute_together_is_measured_on_each_of_them():
    vision, llm = Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=2, tp=2)
    plan = Plan(placement="colocated", grids=(vision, llm), num_microbatches=4)
    boxes = measured_boxes(plan, pl.DataFrame([observation(rank) for rank in (0, 1)]))
    assert boxes["worker"].to_list() == [0, 1]


def observation(rank, start_s=0.0):
    return {"rank": rank, "module": "llm", "pp_stage": 0, "dp_rank": 0, "microbatch": 0, "pass": "forward"} | {
        "start_s": start_s,
        "seconds": 1.0,
    }


def words(picture: Picture) -> str:
    """All that stands in a picture, and all that its views are made of."""
    views = [json.dumps(panel.view, ensure_ascii=False) for panel in picture.panels]
    return " | ".join([picture.finding, picture.note, *(panel.title for panel in picture.panels), *views])


def texts(path: Path) -> str:
    """All that a person reads in a picture."""
    root = ElementTree.parse(path).getroot()
    said = [" ".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    return re.sub(r"\s+", " ", " | ".join(said))
