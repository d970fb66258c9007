"""A wheel holds all that a folder away from any checkout needs: `dflop init` begins one, and Snakemake runs there."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.serial

REPOSITORY = Path(__file__).parents[2]


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=REPOSITORY)
    (wheel,) = folder.glob("dflop-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder that a wheel of this checkout is installed into, without what it depends on, which is here."""
    site = tmp_path_factory.mktemp("installed") / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=site.parent)
    return site


@pytest.fixture(scope="module")
def started(installed, tmp_path_factory) -> Path:
    """A folder begun by the installed package."""
    parent = tmp_path_factory.mktemp("work")
    said = run(sys.executable, "-m", "dflop.cli", "init", "my-run", cwd=parent, PYTHONPATH=str(installed))
    assert "cd my-run" in said
    assert "--configfile config/examples/own_data_cpu.yaml" in said
    return parent / "my-run"


def test_the_wheel_holds_the_files_of_the_checkout(installed):
    for folder in ("workflow", "config"):
        ours = {path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*") if path.is_file()}
        ours = {path for path in ours if "__pycache__" not in path.parts}
        there = installed / "dflop/shipped"
        assert {path for path in ours if (REPOSITORY / path).read_bytes() != (there / path).read_bytes()} == set()


def test_two_builds_of_the_same_files_are_the_same_bytes(tmp_path):
    """Folders of other names, with files of another age and other rights."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY)
    built = []
    for number, folder in enumerate(("here", "elsewhere/deeper")):
        for name in filter(None, listed.split("\0")):
            if not (REPOSITORY / name).is_file():
                continue
            there = tmp_path / folder / name
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, there, follow_symlinks=False)
            if not there.is_symlink():
                there.chmod((REPOSITORY / name).stat().st_mode & 0o111 | (0o644, 0o660)[number])
                os.utime(there, (10**9 * number, 10**9 * number))
        built.append(tmp_path / f"dist-{number}")
        build = ("-m", "hatchling", "build", "-d", built[-1])
        run(sys.executable, *build, cwd=tmp_path / folder, SOURCE_DATE_EPOCH="1790000000")
    digests = [{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir()} for dist in built]
    assert digests[0] == digests[1]
    assert {Path(name).suffix for name in digests[0]} == {".whl", ".gz"}


def test_snakemake_lists_and_runs_the_demos_jobs_where_only_the_wheel_is(installed, started):
    environment = {"PYTHONPATH": str(installed), "PATH": f"{installed / 'bin'}:{os.environ['PATH']}"}
    where = run(sys.executable, "-c", "import dflop; print(dflop.__file__)", cwd=started, **environment)
    assert Path(where.strip()).is_relative_to(installed)
    listed = run("snakemake", "--cores", "2", "-n", cwd=started, **environment)
    for rule in ("demo_data", "profile_costs: module=llm tp=1", "search_plan", "train", "report"):
        assert f"{rule}\n" in listed
    # The demo's data are drawn, so that its shards are known; its own config is found beside the workflow.
    run("snakemake", "--cores", "2", "results/demo-data/train.json", cwd=started, **environment)
    listed = run("snakemake", "--cores", "2", "-n", "--config", "train.lr=1e-3", cwd=started, **environment)
    assert "profile_shapes: shard=demo-data-train" in listed
    assert "steps: 50" in (started / "results/demo/config.yaml").read_text()


def test_the_slurm_profile_is_found_by_its_name_with_an_empty_home(installed, started, tmp_path):
    listed = run(
        *("snakemake", "--profile", "slurm", "-n", "--configfile", "config/examples/slurm_one_node.yaml"),
        *("--config", "data.sources=[{path: results/demo-data/train.json}]", "model.path=null"),
        cwd=started,
        PYTHONPATH=str(installed),
        HOME=str(tmp_path),
    )
    assert "search_plan" in listed


def test_a_folder_that_holds_something_is_left_as_it_is(installed, started):
    before = sorted(path for path in started.rglob("*") if "results" not in path.parts)
    done = subprocess.run(
        [sys.executable, "-m", "dflop.cli", "init", str(started)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"dflop: {started} is not empty")
    assert sorted(path for path in started.rglob("*") if "results" not in path.parts) == before


def test_the_sampler_needs_nothing_of_dflops_dependencies_but_numpy_numba_and_torch(installed, tmp_path):
    """What `pip install --no-deps dflop` promises: everything else that dflop depends on cannot be imported here."""
    script = """
import importlib.abc, sys
from importlib.metadata import packages_distributions, requires
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

wanted = {canonical(r.name) for r in map(Requirement, requires("dflop")) if r.marker is None}
hidden = wanted - {"numpy", "numba", "torch"}
modules = {name for name, owners in packages_distributions().items() if hidden & set(map(canonical, owners))}
assert {"snakemake", "mip", "transformers"} <= modules

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
from dflop import BalancedBatchSampler, pads_batches

sampler = BalancedBatchSampler([3.0, 1.0, 2.0, 4.0] * 8, 2, num_replicas=2, rank=0, padded=False)
assert sum(len(batch) for batch in sampler) == 16
"""
    run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(installed))


@pytest.mark.exhaustive
def test_the_whole_demo_runs_in_an_environment_that_was_empty(wheel, tmp_path):
    """The wheel and what it depends on, with nothing else on the path: minutes, and gigabytes where torch has CUDA."""
    programs = tmp_path / "environment/bin"
    run(sys.executable, "-m", "venv", programs.parent, cwd=tmp_path)
    run(programs / "python", "-m", "pip", "install", "-c", REPOSITORY / "constraints.txt", wheel, cwd=tmp_path)
    environment = {"PATH": f"{programs}:{os.defpath}", "PYTHONPATH": "", "VIRTUAL_ENV": str(programs.parent)}
    run(programs / "dflop", "init", "my-run", cwd=tmp_path, **environment)
    run(programs / "snakemake", "--cores", "2", cwd=tmp_path / "my-run", **environment)
    assert (tmp_path / "my-run/results/demo/report/index.html").is_file()
