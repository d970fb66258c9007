"""A copy of the repository in which workflow tests run Snakemake, as a user would in a clone."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]


class Checkout:
    """A copy of the repository to run commands in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("workflow", "config"):
            shutil.copytree(REPOSITORY / name, folder / name)
        (folder / "slurm").symlink_to("workflow/profiles/slurm")

    def snakemake(self, *arguments: str, timeout: int = 480, **environment: str) -> subprocess.CompletedProcess:
        return self.run("snakemake", *arguments, timeout=timeout, **environment)

    def run(self, *command: str, timeout: int = 60, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=timeout, env=os.environ | environment
        )

    def write_config(self, name: str, **sections: object) -> str:
        (self.folder / name).write_text(yaml.safe_dump(sections))
        return name

    def jobs_of_dry_run(self, *arguments: str, **environment: str) -> list[str]:
        """Names of the rules that a dry run lists, one a job."""
        return self._jobs("-n", *arguments, **environment)

    def jobs_of_run(self, *arguments: str) -> list[str]:
        """Names of the rules that a run starts, one a job."""
        return self._jobs(*arguments)

    def _jobs(self, *arguments: str, **environment: str) -> list[str]:
        done = self.snakemake("--cores", "2", *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return [
            line.split()[1].rstrip(":")
            for line in (done.stdout + done.stderr).splitlines()
            if line.startswith(("rule ", "localrule ", "checkpoint "))
        ]


@pytest.fixture(scope="session")
def make_checkout(tmp_path_factory) -> Callable[[], Checkout]:
    return lambda: Checkout(tmp_path_factory.mktemp("checkout"))
