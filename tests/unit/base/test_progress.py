"""Progress as a log has it: whole lines, with a rate and what is still to go."""

import sys
import threading
from itertools import count

from dflop.base import progress
from dflop.base.progress import progress_bar, progress_line


def test_a_line_says_how_far_how_fast_and_how_long_still():
    state = {"n": 1200, "total": 40_000, "unit": "record", "elapsed": 20.0, "prefix": "train.json", "postfix": None}
    assert progress_line(state) == "train.json: 1,200 of 40,000 records (3%), 60 a second, to go 0:10:47"


def test_without_an_end_there_is_none_to_wait_for():
    state = {"n": 30, "total": None, "unit": "sample", "elapsed": 2.0, "prefix": "", "postfix": None}
    assert progress_line(state) == "30 samples, 15 a second"


def test_where_nothing_can_be_drawn_over_nothing_is_drawn(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with progress_bar(total=3, unit="record") as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""  # done within a minute
    monkeypatch.setattr(progress, "_BETWEEN_LINES_S", 0)
    with progress_bar(total=3, unit="record") as bar:
        bar.update(1)
        bar.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.count("of 3 records") == 1 and "\r" not in line for line in lines)


def test_bars_in_a_log_leave_no_threads_and_a_clock_that_is_set_back_does_not_silence_them(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(progress, "_BETWEEN_LINES_S", 0)
    monkeypatch.setattr("tqdm.std.time", (-3600.0 * call for call in count()).__next__)
    before = threading.active_count()
    with progress_bar(total=3) as bar:
        bar.update(1)
        bar.update(1)
    assert "2 of 3" in capsys.readouterr().err
    assert threading.active_count() == before
