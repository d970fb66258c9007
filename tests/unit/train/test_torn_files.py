"""Files that a crash, a full disk or a hand left torn: each is mended or moved aside, said, and the run goes on."""

import json
import resource
import shutil
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from dflop.base.artifacts import written_whole
from dflop.schedule import read_learned
from dflop.step import Node, Op, Span
from dflop.train import merge_observations
from dflop.train.checkpoint_files import checksums_of, damage_in, find_checkpoint, write_checksums
from dflop.train.metrics import mend_metrics
from dflop.train.observations import CORRECTIONS_FILE, Observations
from dflop.train.step_log import StepLog
from dflop.train.step_seconds import PARTS

LEFT_OUT = pl.DataFrame({"sample_id": []}, schema={"sample_id": pl.String})
NODES = (Node("vision", 0, 0), Node("llm", 0, 0))
PARTS_OF_RANKS = np.zeros((1, len(PARTS)))


def line(step):
    return json.dumps({"step": step, "loss": 1.5}) + "\n"


@pytest.mark.parametrize("torn", ['{"step": 1, "lo', "\x00\x00\x00", '{"step": 1}', "[1]"])
def test_a_torn_line_is_left_out_and_the_file_as_it_was_is_kept(tmp_path, capsys, torn):
    path = tmp_path / "metrics.jsonl"
    written = line(0) + torn + "\n" + line(2) + line(3).rstrip()
    path.write_text(written)
    assert [step["step"] for step in mend_metrics(path, before_step=3)] == [0, 2]
    assert path.read_text() == line(0) + line(2)
    assert (tmp_path / "metrics.jsonl.torn").read_text() == written
    assert "metrics.jsonl: 1 of its lines are no whole step" in capsys.readouterr().err


def test_whole_metrics_stay_as_they_are(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    assert mend_metrics(path) == []
    path.write_text(line(0) + line(1))
    assert [step["step"] for step in mend_metrics(path)] == [0, 1]
    assert path.read_text() == line(0) + line(1)
    assert capsys.readouterr().err == ""


def observe(folder, rank, *parts):
    """One rank's observations: a part ends at each of the numbers of steps."""
    own = Observations(folder, rank, NODES)
    schedule = SimpleNamespace(forward_s=np.ones((2, 1)), backward_s=np.ones((2, 1)))
    first = 0
    for end in parts:
        for step in range(first, end):
            own.add(step, schedule, [Span(Op.FORWARD, rank, 0, 1.0, 2.0)], 0.5)
        own.write(own.take(), end)
        first = end
    return own


def merged(folder):
    path = folder.parent / "observations.duckdb"
    return merge_observations(folder, path, LEFT_OUT, {"config_digest": ""}).observations


@pytest.mark.parametrize("content", [b"", b"PAR1", None], ids=["empty", "four bytes", "cut"])
def test_a_torn_part_is_moved_aside_and_the_others_are_kept(tmp_path, capsys, content):
    folder = tmp_path / "observations"
    for rank in range(2):
        observe(folder, rank, 2, 4)
    part = folder / "rank-00001.000004.parquet"
    part.write_bytes(part.read_bytes()[:-30] if content is None else content)
    assert merged(folder)["step", "rank"].rows() == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]
    assert (folder / "rank-00001.000004.parquet.torn").exists()
    assert "rank-00001.000004.parquet: it cannot be read" in capsys.readouterr().err


def test_of_a_part_that_goes_beyond_the_checkpoint_only_earlier_steps_stay(tmp_path):
    folder = tmp_path / "observations"
    observe(folder, 0, 2, 6).forget_from(4)
    assert merged(folder)["step"].to_list() == [0, 1, 2, 3]


def test_what_a_killed_process_had_half_written_is_deleted_and_the_run_goes_on(tmp_path):
    folder = tmp_path / "observations"
    own = observe(folder, 0, 2, 4)
    with written_whole(folder / "rank-00000.000005.parquet") as beside:
        shutil.copy(folder / "rank-00000.000004.parquet", beside)
        killed = shutil.copy(beside, tmp_path / beside.name)
    shutil.move(killed, folder)
    own.forget_from(4)
    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.000002.parquet", "rank-00000.000004.parquet"]
    assert merged(folder)["step"].to_list() == [0, 1, 2, 3]


def test_observations_that_a_disk_did_not_take_go_with_the_next_part(tmp_path):
    folder = tmp_path / "observations"
    own = observe(folder, 0)
    own.add(0, SimpleNamespace(forward_s=np.ones((2, 1)), backward_s=None), [Span(Op.FORWARD, 0, 0, 1.0, 2.0)], 0.5)
    folder.write_text("a file where the folder ought to be")
    with pytest.raises(OSError, match="observations"):
        own.write(own.take(), 1)
    folder.unlink()
    own.write(own.take(), 2)
    assert merged(folder)["step"].to_list() == [0]


@pytest.mark.parametrize(
    "content", ["", '{"about": "x", "bins": [{"modu', '{"about": "x"}', "[]", '{"about": 1, "bins": 2}']
)
def test_torn_corrections_are_moved_aside_and_learned_anew(tmp_path, capsys, content):
    path = tmp_path / CORRECTIONS_FILE
    path.write_text(content)
    assert read_learned(path).num_steps == 0
    assert not path.exists()
    assert path.with_name("corrections.json.torn").read_text() == content
    assert "corrections.json: it cannot be read" in capsys.readouterr().err


def write_checkpoint(folder, step):
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(bytes(range(256)) * 8)
    (path / "run.json").write_text(json.dumps({"step": step, "restarts": 0}))
    write_checksums(path, checksums_of(path, ["__0_0.distcp", "run.json"]))
    return path


def test_a_checkpoint_is_whole_until_one_of_its_bytes_is_another(tmp_path):
    path = write_checkpoint(tmp_path, 3)
    assert damage_in(path) is None
    for part in range(3):
        assert damage_in(path, part, 3) is None
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[1000] ^= 1
    (path / "__0_0.distcp").write_bytes(content)
    assert "__0_0.distcp is not as it was written" in damage_in(path)
    (path / "checksums.json").write_text("{")
    assert "checksums.json cannot be read" in damage_in(path)


def test_the_latest_checkpoint_that_says_what_it_is_of_is_found(tmp_path):
    assert find_checkpoint(tmp_path / "none") is None
    whole = write_checkpoint(tmp_path, 3)
    write_checkpoint(tmp_path, 4).rename(tmp_path / "step-000007")
    (tmp_path / "step-000005").mkdir()
    (tmp_path / "step-000006").write_text("")
    (tmp_path / "step-latest").mkdir()
    assert find_checkpoint(tmp_path) == (whole, {"step": 3, "restarts": 0})


def test_a_line_that_the_disk_did_not_take_is_written_whole_with_a_later_one(tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    files = SimpleNamespace(metrics=metrics, generation=SimpleNamespace(prices=""))
    log = StepLog(files, num_steps=3, world_size=1)
    per_sample = {"sample_id": np.arange(2), "llm_tokens": np.arange(2), "num_items": np.arange(2)}
    figures = (
        "step_s",
        "idle",
        "policy",
        "status",
        "num_beyond_memory",
        "num_left_out",
        "num_samples",
        "deciding_s",
        "corrections_version",
        "measures",
    )
    schedule = SimpleNamespace(extrapolated=np.zeros(1), **per_sample, **dict.fromkeys(figures, 0))
    names = ("loss", "busy_s", "wait_s", "data_wait_s", "grad_norm", "lr", "unreadable", "undecodable", "eager")
    totals = dict.fromkeys(names, 1.0)
    log.add(0, schedule, totals, 2.0, 1.0, PARTS_OF_RANKS)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 50, limits[1]))
    try:
        log.unsaved = "no space left"
        log.add(1, schedule, totals, 2.0, 1.0, PARTS_OF_RANKS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0]
    log.unsaved = None
    log.add(2, schedule, totals, 2.0, 1.0, PARTS_OF_RANKS)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 1, 2]
    first, second, third = capsys.readouterr().out.splitlines()
    assert "step 1/3  loss 1.000  lr 1.00e+00  2.00 s" in first
    assert first.endswith("to go 0:00:04")
    assert "NOT SAVED: no space left  metrics.jsonl not written: [Errno 27]" in second
    assert third.endswith("to go 0:00:00")
