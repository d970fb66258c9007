"""A copy of the repository in which workflow tests run Snakemake, as a user would in a clone."""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
_JOB = re.compile(r"\d\d:\d\d:\d\d (?:rule|checkpoint) (\w+)")

_STUB = """#!/bin/sh
# Writes what the commands' options name; of profile-costs and schedule also what stands beside.
while [ $# -gt 0 ]; do
  case $1 in
    --out | --candidates | --bounds)
      case $2 in
        */schedule.parquet) for part in stages steps rejects; do : > "${2%.parquet}_$part.parquet"; done ;;
        */costs/*.tp*.parquet) : > "${2%.parquet}.parameters.parquet"; : > "${2%.parquet}.device.parquet" ;;
        */train) mkdir -p "$2"; : > "$2/summary.json" ;;
        */report) for plot in costs plans timeline training time_split; do : > "$2/$plot.svg"; done
          : > "$2/summary.json"; : > "$2/index.html" ;;
      esac
      [ -d "$2" ] || { case $2 in --*) ;; *) : > "$2" ;; esac; } ;;
  esac
  shift
done
"""


class Checkout:
    """A copy of the repository to run commands in."""

    def __init__(self, folder: Path, server: Callable[[bool], subprocess.Popen], served: dict[str, str]) -> None:
        self.folder, self._server, self._served = folder, server, served
        for name in ("workflow", "config"):
            shutil.copytree(REPOSITORY / name, folder / name)
        (folder / "slurm").symlink_to("workflow/profiles/slurm")

    def snakemake(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Run `snakemake`, forked from a process that has imported it, and dflop, if it is not to import another. Its
        jobs' `dflop` is a fork, too, if it is not to find another."""
        server = self._server("PYTHONPATH" not in environment)
        environment = self._served | environment
        with tempfile.TemporaryDirectory() as folder:
            stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
            request = {
                "arguments": arguments,
                "folder": str(self.folder),
                "environment": os.environ | environment,
                "stdout": str(stdout),
                "stderr": str(stderr),
            }
            print(json.dumps(request), file=server.stdin, flush=True)
            code = int(server.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=os.environ | environment)

    def write_config(self, name: str, **sections: object) -> str:
        (self.folder / name).write_text(yaml.safe_dump(sections))
        return name

    def path_with_stubs(self, **programs: str) -> str:
        """A PATH with a `dflop` that does nothing but leave files, and other programs by their scripts."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        for name, script in {"dflop": _STUB, **programs}.items():
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    def jobs_of_dry_run(self, *arguments: str, **environment: str) -> list[str]:
        """Names of the rules that a dry run lists, one a job."""
        return self._jobs("-n", *arguments, **environment)

    def jobs_of_run(self, *arguments: str) -> list[str]:
        """Names of the rules that a run starts, one a job."""
        return self._jobs(*arguments)

    def _jobs(self, *arguments: str, **environment: str) -> list[str]:
        done = self.snakemake("--cores", "2", *arguments, **environment)
        print(done.stdout, done.stderr)  # why each is listed, for the reader of a failure
        assert done.returncode == 0, done.stdout + done.stderr
        found = (_JOB.match(line) for line in (done.stdout + done.stderr).splitlines())
        return [match[1] for match in found if match]


@pytest.fixture(scope="session")
def snakemake_server() -> Iterator[Callable[[bool], subprocess.Popen]]:
    """`snakemake_server(has_dflop)`: a process that has imported Snakemake, and dflop or not."""
    command = [sys.executable, str(Path(__file__).with_name("snakemake_server.py"))]
    with contextlib.ExitStack() as stack:

        @functools.cache
        def server(has_dflop: bool) -> subprocess.Popen:
            return stack.enter_context(
                subprocess.Popen(
                    [*command, *(["dflop"] if has_dflop else [])],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

        yield server


@pytest.fixture(scope="session")
def dflop_server() -> Iterator[dict[str, str]]:
    """Variables with which `dflop` is run by a process that has imported it."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        with subprocess.Popen([sys.executable, here / "dflop_server.py", path], stdout=subprocess.PIPE) as server:
            try:
                server.stdout.readline()  # it is ready
                yield {"DFLOP_SERVER": path, "PATH": f"{here / 'served'}:{os.environ['PATH']}"}
            finally:
                server.kill()


@pytest.fixture(scope="session")
def make_checkout(tmp_path_factory, snakemake_server, dflop_server) -> Callable[[], Checkout]:
    return lambda: Checkout(tmp_path_factory.mktemp("checkout"), snakemake_server, dflop_server)
