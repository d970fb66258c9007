"""A private Slurm and a fresh clone, as a user of a cluster has them."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mini_slurm import PACKAGES, MiniSlurm, what_is_missing

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[MiniSlurm]:
    """Two nodes of four CPUs each, without accounting."""
    if missing := what_is_missing():
        complaint = f"needs {', '.join(missing)} (Debian: apt-get install {' '.join(PACKAGES)}; or make test-slurm)"
        if "CI" in os.environ:
            pytest.fail(complaint)
        pytest.skip(complaint)
    folder = tmp_path_factory.mktemp("slurm", numbered=True)
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(0o755)
    with MiniSlurm(folder / "cluster") as running:
        yield running


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Iterator[Path]:
    """A clone of the repository with the changes that are not committed yet. Its `__pycache__` folders are the
    checkout's; nothing else that git ignores comes along, such as `results/`."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if not os.path.lexists(REPOSITORY / name):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
    # Numba's kernels are compiled once for both: what lies in its cache is found by the code's digest.
    for package in {path.parent for path in (folder / "dflop").rglob("*.py")}:
        compiled = REPOSITORY / package.relative_to(folder) / "__pycache__"
        compiled.mkdir(exist_ok=True)
        (package / "__pycache__").symlink_to(compiled)
    (folder / "home").mkdir()
    yield folder
    # Without control groups, Slurm loses sight of what a job that was put back into the queue leaves.
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(path / "cwd") == str(folder):
                os.kill(int(path.name), signal.SIGKILL)
