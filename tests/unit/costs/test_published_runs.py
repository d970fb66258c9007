"""Prices of published runs are no further from what was published than they were (`tests/benchmarks/published*.py`)."""

import json
import statistics
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import published
import published_multimodal as multimodal
from multimodal_rows import NOT_PRICED, rows

# Prices over what was published, of steps and memory, and of ratios of two runs, when this was last looked at.
RECORDED = json.loads(Path(__file__).with_name("published_multimodal.json").read_text(encoding="utf-8"))
# Rows whose layers are counted in seconds.
QUICK = ("lf_hetero_dp", "swift_qwen2_5_vl_7b_recompute")
ROUNDING = 0.015


@pytest.fixture(scope="module")
def source(shared_data):
    return yaml.safe_load((shared_data / "published/multimodal.yaml").read_text(encoding="utf-8"))


def test_every_run_that_can_be_used_is_priced_or_said_why_not(source):
    usable = {run["id"] for run in source["runs"] if run["usability"] != "D"}
    priced = {row.name.split("/")[0] for row in rows()}
    assert usable <= priced | set(NOT_PRICED)
    assert not priced & set(NOT_PRICED)


@pytest.mark.parametrize("names", [QUICK, pytest.param(("",), marks=pytest.mark.exhaustive)])
def test_no_price_of_a_multimodal_run_is_further_off_than_it_was(names, source):
    told, prices, found = multimodal.published(source), {}, {}
    for row in rows():
        if row.name.startswith(names):
            prices[row.name] = multimodal.priced(row)
            found |= multimodal.errors_of(multimodal.compared(row, told.get(row.name), prices[row.name]))
    found |= {f"{pair['name']}, {pair['what']}": pair["of_it"] for pair in multimodal.ratios(source, prices)}
    assert found
    worse = {name: ratio for name, ratio in found.items() if abs(ratio - 1) > abs(RECORDED[name] - 1) + ROUNDING}
    assert not worse


@pytest.mark.exhaustive
def test_no_price_of_runs_of_text_is_further_off_than_it_was(shared_data):
    folder = shared_data / "published"
    runs = [*published.mpt_runs(folder / "mpt_fsdp.csv"), *published.single_runs(folder / "llm_runs.json")]
    errors = [abs(published.predicted(run)[0] / run.published_s - 1) for run in runs]
    assert len(errors) == 74
    assert statistics.median(errors) < 0.08
    assert max(errors) < 0.27
