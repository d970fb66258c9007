"""What is printed of a job that runs again, and of one that failed."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow" / "lib"))

from short_log import Formatter, changes_in, last_lines


def _reason(was: str, now: str) -> str:
    return f"Params have changed since last execution: before: '{was}'; now: '{now}'"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            _reason('{"train": {"lr": 0.1, "steps": 3}}', '{"train": {"lr": 0.2, "steps": 3}}'),
            "train.lr was 0.1 and is 0.2",
        ),
        ("Params have changed since last execution: before: 'a'; now: 'b'", "its settings changed"),
        ("Missing output files: results/demo/plan.yaml", ""),
        ("Forced execution", "it was asked for"),
    ],
)
def test_a_job_that_runs_again_says_what_is_other_in_its_config(reason, said):
    assert changes_in(reason) == said


def test_of_a_failed_jobs_log_stand_its_reasons_or_else_its_last_lines(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("noise\ndflop: warning: slow\ndflop: rank 1 ended first\nmore noise\ndflop: training ended early\n")
    assert last_lines(log) == ["dflop: rank 1 ended first", "dflop: training ended early"]
    log.write_text("\n".join(map(str, range(100))))
    assert last_lines(log) == [str(number) for number in range(88, 100)]
    os.unlink(log)
    assert last_lines(log) == []


def test_an_earlier_jobs_log_is_not_shown_for_this_one_whatever_the_clock_says(tmp_path):
    log = tmp_path / "train.log"
    about = {"jobid": 1, "rule_name": "train", "wildcards": {}, "is_checkpoint": False, "reason": "", "rule_msg": None}
    about["log"] = [str(log)]
    formatter = Formatter(set(), True)
    log.write_text("dflop: of an earlier job\n")
    os.utime(log, (2**32, 2**32))
    formatter._job(about)
    assert "earlier" not in formatter._error(about)
    log.write_text("dflop: of this job\n")
    os.utime(log, (1, 1))  # the clock was set back
    assert "dflop: of this job" in formatter._error(about)
