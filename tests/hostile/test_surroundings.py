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

from dflop.cli import main
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


def test_little_memory_for_libraries_is_one_line_that_says_how_to_have_more(schedule):
    """Some of them end the process when they are loaded."""
    for limit in (400, 2000):
        done = schedule(before=lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20)))
        assert done.returncode == 2
        assert re.fullmatch(r"dflop: `ulimit -v` leaves \d\.\d GB.*; run `ulimit -v unlimited` first\n", done.stderr)


def test_help_is_given_with_little_memory():
    code = "from dflop.cli import main; main()"
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))  # noqa: E731
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--help"], preexec_fn=limit, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout


def test_a_module_that_memory_is_too_small_for_is_one_line(monkeypatch, capsys):
    def plan():
        raise ImportError("failed to map segment from shared object")

    monkeypatch.setattr("dflop.cli.cli", lambda **_: plan())
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 << 30, 4 << 30))
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith("dflop: `ulimit -v` leaves 4.3 GB")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    with pytest.raises(ImportError):
        main()


def test_a_package_that_is_missing_is_not_said_to_lack_memory(monkeypatch):
    def load() -> None:
        raise ModuleNotFoundError("No module named 'peft'")

    monkeypatch.setattr("dflop.cli.cli", lambda **_: load())
    monkeypatch.setattr("dflop.cli._address_limit", lambda: 100 << 30)
    with pytest.raises(ModuleNotFoundError, match="peft"):
        main()


def test_a_command_works_where_standard_files_are_closed(schedule, tmp_path):
    _has_worked(schedule(before=lambda: os.closerange(0, 3)), tmp_path)


def test_no_file_of_a_run_gets_the_number_of_a_standard_file_that_is_closed():
    """Libraries print to these numbers."""
    code = "import os, sys\nfrom dflop.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "sys.exit(min(os.open(os.devnull, os.O_RDONLY), 9) + 40)"
    for closed in ((2,), (1, 2), (0, 1, 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, "plan", "--nothing"],
            preexec_fn=lambda closed=closed: [os.close(number) for number in closed],
        )
        assert done.returncode > 42


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
