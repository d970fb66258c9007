"""Commands work in poor surroundings, or say in one line what is wrong there. The run lies in a folder whose name has
spaces and an umlaut."""

import ctypes
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dflop.shapes.manifests.index import ManifestFile
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import parse_record

_DROP_BOUNDING, _DAC_OVERRIDE = 24, 1


@pytest.fixture
def schedule(make_run, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """`schedule(*options of Python, before, **environment)`: `dflop schedule` for a small run, in the folder `Läufe von
    heute`; None takes a variable away."""
    run = make_run(num_samples=30, num_microbatches=2, batch_size=8)
    folder = tmp_path / "Läufe von heute"
    folder.mkdir()
    arguments = ["--config", yaml.safe_dump(run.config, default_flow_style=True, width=2**20).strip()]
    for name, path in run.paths.items():
        path.rename(folder / path.name)
        arguments += [f"--{name}", path.name]

    def start(*options: str, before: Callable[[], object] | None = None, **environment: str | None):
        changed = {name: value for name, value in (os.environ | environment).items() if value is not None}
        code = "from dflop.cli import main; main()"
        return subprocess.run(
            [sys.executable, *options, "-c", code, "schedule", *arguments, "--batches=1", "--out=out/schedule.parquet"],
            cwd=folder,
            env=changed,
            preexec_fn=before,
            capture_output=True,
            text=True,
            errors="replace",
        )

    return start


def _few_files_and_one_core() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_a_command_works_in_c_on_one_core_with_few_files_and_a_home_that_is_no_folder(schedule, tmp_path):
    variables = {"HOME": os.devnull, "XDG_CACHE_HOME": None, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": None}
    _has_worked(schedule(before=_few_files_and_one_core, **variables), tmp_path)


def test_a_command_works_without_home_programs_and_asserts(schedule, tmp_path):
    _has_worked(schedule("-O", HOME=None, XDG_CACHE_HOME=None, PATH="/nowhere"), tmp_path)


def _has_worked(done: subprocess.CompletedProcess, folder: Path) -> None:
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert (folder / "Läufe von heute/out/schedule.parquet").stat().st_size


def _as_root_without_rights() -> None:
    """As root, give up the right to write where the permissions forbid it. Others have no such right."""
    if os.getuid() == 0 and ctypes.CDLL(None).prctl(_DROP_BOUNDING, _DAC_OVERRIDE, 0, 0, 0):
        os._exit(77)


def test_results_that_cannot_be_written_are_one_line(schedule, tmp_path):
    out = tmp_path / "Läufe von heute/out"
    out.mkdir(mode=0o555)
    done = schedule(before=_as_root_without_rights)
    if done.returncode == 77:
        pytest.skip("root cannot give up its rights here")
    assert done.returncode == 2
    assert re.fullmatch(r"dflop: out/schedule\.parquet: .*Permission denied\n", done.stderr)
    assert not list(out.iterdir())


def test_a_line_of_two_gib_costs_its_record_and_little_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    record = b'{"id": "a", "conversations": []}\n'
    with (path := tmp_path / "list.jsonl").open("wb") as file:
        file.write(record)
        file.seek(2**31, os.SEEK_CUR)  # zeros that take no room on the disk
        file.write(b"\n" + record)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    manifest = ManifestFile(path)
    assert len(manifest) == 3
    assert manifest.read(0)["id"] == manifest.read(2)["id"] == "a"
    with pytest.raises(RecordError):
        parse_record(manifest.read(1))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
