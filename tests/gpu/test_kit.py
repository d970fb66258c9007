"""The kit for a GPU is tested without one: what it lists, how it judges, and each check in tiny sizes on the CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from threading import Barrier

import pytest

from tests.gpu.check import Check, Setting, Skipped, at_least, at_most
from tests.gpu.checks import CHECKS
from tests.gpu.runner import _without_result, expected_s, in_child, page, run_check, run_checks, said

# Checks that take few seconds on a CPU. The others are tried before a release.
IN_CI = ("gradients", "attention", "utilisation", "groups", "optimiser", "offloaded", "faults")


def setting_in(folder) -> Setting:
    return Setting(device="cpu", is_tiny=True, is_fast=True, folder=folder)


def test_without_a_gpu_the_kit_lists_its_checks_and_ends_well():
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(check.name in done.stdout and check.shows in done.stdout for check in CHECKS)


def test_all_checks_fit_into_half_an_hour_and_the_fast_ones_into_six_minutes():
    assert expected_s(CHECKS, is_fast=False) <= 30 * 60
    assert expected_s([check for check in CHECKS if check.fast_s], is_fast=True) <= 6 * 60


@pytest.mark.parametrize(
    "check",
    [pytest.param(own, id=own.name, marks=() if own.name in IN_CI else pytest.mark.exhaustive) for own in CHECKS],
)
def test_a_check_measures_its_figures_and_meets_the_limits_that_count_on_a_cpu(check, tmp_path):
    try:
        *_, figures = check.measure(setting_in(tmp_path))
    except Skipped as why:
        pytest.skip(str(why))
    result = check.judged(figures, "cpu")
    assert result["status"] == "pass", result
    assert result["figures"]
    for start in (start for start, limit in check.limits.items() if not limit.of_card):
        assert any(name.startswith(start) for name in result["figures"]), f"nothing is judged by {start!r}"


LIMITS = {"error": at_most(0.1), "error of llm": at_most(0.2), "rate": at_least(5.0, of_card=True)}
CHECK = Check(name="made-up", shows="nothing", run="nowhere:nothing", seconds=1, limits=LIMITS)


def test_a_figure_is_judged_by_the_limit_that_names_it_most_closely_and_rates_on_gpus_only():
    figures = {"error of llm": 0.15, "error of vision": 0.15, "rate": 1.0, "remark": 3.0}
    assert CHECK.judged(figures, "cpu")["missed"] == ["error of vision"]
    assert CHECK.judged(figures, "cuda")["missed"] == ["error of vision", "rate"]
    assert CHECK.judged({"error": float("nan")}, "cpu")["status"] == "fail"


def test_a_package_that_is_missing_skips_its_check_with_a_line(tmp_path):
    in_child(replace(CHECK, needs=("a_package_that_is_not_there",)), setting_in(tmp_path))
    result = json.loads((tmp_path / "made-up.json").read_text())
    assert result["status"] == "skipped"
    assert result["reason"] == "needs a_package_that_is_not_there, which is not installed"


def test_a_check_that_ends_with_an_error_or_takes_too_long_is_one_line_more(tmp_path, monkeypatch):
    result = run_check(CHECK, setting_in(tmp_path))  # the child knows no such check
    assert (result["status"], result["check"]) == ("error", "made-up")
    assert "exit code 2" in said(result)
    monkeypatch.setattr(Check, "longest_s", 0.1)
    result = run_check(CHECKS[0], setting_in(tmp_path))
    assert (result["status"], result["reason"]) == ("timeout", "no result within 0 s")


def test_what_a_check_has_measured_until_an_error_is_kept(tmp_path, monkeypatch):
    def cut_off(setting):
        yield {"rate": 7.0}
        raise RuntimeError("broken")

    monkeypatch.setattr("tests.gpu.benches.cut_off", cut_off, raising=False)
    check = replace(CHECK, run="benches:cut_off")
    with pytest.raises(RuntimeError):
        in_child(check, setting_in(tmp_path))
    result = _without_result(check, 1, tmp_path / "made-up.log")
    assert (result["status"], result["figures"]) == ("error", {"rate": 7.0})
    assert "rate: 7" in said(result | {"check": check.name, "seconds": 1.0})


def test_checks_that_nothing_disturbs_run_beside_each_other_and_before_the_timed_ones(tmp_path, monkeypatch):
    both = Barrier(2, timeout=30)

    def run(check, setting):
        if not check.is_timed:
            both.wait()
        return {"check": check.name}

    monkeypatch.setattr("tests.gpu.runner.run_check", run)
    checks = [replace(CHECK, name=name, is_timed=name == "timed") for name in ("timed", "one", "other")]
    assert [result["check"] for result in run_checks(checks, setting_in(tmp_path))][2] == "timed"


def test_the_page_has_every_figure_and_what_was_skipped():
    machine = {"card": "NVIDIA H100 80GB HBM3", "torch": "2.11.0"}
    judged = CHECK.judged({"error of llm": 0.3, "rate": 7.0}, "cuda")
    results = [
        {"check": "made-up", "machine": machine, **judged},
        {"check": "other", "status": "skipped", "reason": "needs polars, which is not installed"},
    ]
    name, text = page(results, "python -m tests.gpu")
    assert name == "nvidia-h100-80gb-hbm3.md"
    assert "| made-up | error of llm | 0.3 | <= 0.2 | missed |" in text
    assert "| other | | | | skipped: needs polars, which is not installed |" in text
