"""The workflow on a Slurm cluster of two nodes, by the command that a user types: `snakemake --profile slurm`.

Everything is real but for the nodes, which are daemons of this machine. One whole run is shared: its training is
killed once in the middle, and once it is told of its end ahead of time.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
import yaml

from dflop.base import start_folder
from dflop.demo import make_demo_data

pytestmark = [pytest.mark.serial, pytest.mark.timeout(1500)]

NUM_STEPS = 24
# The demo over two nodes with a process each, and shorter.
CONFIG = {
    "cluster": {"device": "cpu", "num_nodes": 2, "devices_per_node": 1},
    "data": {"samples_per_shard": 200},
    "costs": {"repeats": 1, "time_budget_s": 2},
    "plan": {"search_batches": 1, "placements": ["disjoint"], "fixed": {"num_microbatches": 2}},
    "schedule": {"policy": "lpt"},
    "train": {"steps": NUM_STEPS, "checkpoint_every": 2, "global_batch_size": 4, "loader_workers": 0},
    "slurm": {
        "memory_gib": 3,
        "stages": {"profile_shapes": {"cpus": 2, "memory_gib": 1}, "search_plan": {"cpus": 2, "memory_gib": 2}},
    },
}


# In a folder of one's own, for GPUs that are not there.
WHAT_IF = {
    "run": "mine",
    "data": {"sources": [{"path": "data/train.json"}]},
    "cluster": {"num_nodes": 2, "devices_per_node": 2, "device_model": "h100-80g"},
    "costs": {"source": "analytic", "implementation": "eager"},  # which need no tracing
    "plan": {"search_batches": 1, "today": {"llm": {"tp": 1, "pp": 1, "dp": 4}}},
    "train": {"precision": "bf16", "global_batch_size": 8},
    "slurm": CONFIG["slurm"],
}


class Run:
    """`snakemake --profile slurm` with an empty home folder, watched from beside."""

    def __init__(self, clone: Path, cluster, *arguments: str) -> None:
        self._clone = clone
        self._process = subprocess.Popen(
            ["snakemake", "--profile", "slurm", *arguments],
            cwd=clone,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"PATH": cluster.path, "HOME": str(clone / "home")},
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            print(line, end="", file=sys.stderr)
            self._lines.append(line.rstrip())

    @property
    def lines(self) -> list[str]:
        return list(self._lines)

    def wait_for(self, found, seconds: float = 1200):
        """What `found()` gives as soon as it gives something, while the run goes on."""
        last = time.monotonic() + seconds
        while not (result := found()):
            if self._process.poll() is not None or time.monotonic() > last:
                self.end(5)
                pytest.fail("the run ended, or this took too long:\n" + "\n".join(self._lines))
            time.sleep(0.2)
        return result

    def end(self, seconds: float) -> int:
        """The exit code; a run that does not end in time is ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        self._reader.join(10)
        return self._process.returncode


def _ranks(clone: Path) -> list[int]:
    """The processes that train in the clone."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes()
            is_rank = b"dflop.train.rank\0" in command and b"torchrun" not in command
            if is_rank and os.readlink(path / "cwd") == str(clone):
                found.append(int(path.name))
    return found


def _jobs(cluster, name: str) -> list[str]:
    """The numbers of the jobs of a name that run."""
    return cluster.ask("squeue", "-h", "-t", "running", f"--name={name}", "-o", "%i").split()


@pytest.fixture(scope="module")
def finished(clone, cluster):
    """A finished run: what it printed, and how many steps had been made when it was disturbed."""
    demo = yaml.safe_load((clone / "config/config.yaml").read_text())
    for section, keys in CONFIG.items():
        demo[section] = demo.get(section, {}) | keys
    (clone / "config/config.yaml").write_text(yaml.safe_dump(demo))
    (clone / "config/demo.yaml").write_text("{}\n")
    train = clone / "results/demo/train"

    def num_steps() -> int:
        path = train / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    run = Run(clone, cluster)
    run.wait_for(lambda: num_steps() >= 5 and list(train.glob("checkpoints/step-*")) and _ranks(clone))
    steps = [num_steps()]
    os.kill(_ranks(clone)[0], signal.SIGKILL)
    run.wait_for(lambda: any("ended as FAILED" in line for line in run.lines))
    number = run.wait_for(lambda: num_steps() > steps[0] + 1 and _ranks(clone) and _jobs(cluster, "train"))[0]
    steps.append(num_steps())
    cluster.ask("scancel", "--signal=USR1", number)  # as `--signal` has Slurm do ahead of a time limit
    code = run.end(900)
    assert code == 0, "\n".join(run.lines)
    return run.lines, steps


def test_training_goes_on_after_a_kill_and_after_a_warning_of_its_end(finished, clone):
    metrics = [json.loads(line) for line in (clone / "results/demo/train/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in metrics] == list(range(NUM_STEPS))
    summary = json.loads((clone / "results/demo/train/summary.json").read_text())
    assert summary["restarts"] == 2
    assert "going on from" in (clone / "results/demo/logs/train.log").read_text()


def test_a_job_killed_is_said_in_a_line_with_its_number_its_log_and_the_reason(finished):
    lines, _ = finished
    (line,) = [line for line in lines if "ended as" in line]
    assert line.startswith("Slurm job ")
    assert "(train) ended as FAILED" in line
    assert line.endswith("log: results/demo/logs/train.log")


def test_jobs_have_the_names_of_their_rules_and_wildcards_and_shards_share_one(finished, cluster):
    names = [job["Name"] for job in cluster.ended_jobs()]
    assert set(names) >= {
        *("profile_links", "profile_loading", "search_plan", "train"),
        *("profile_costs.module=llm.tp=1", "profile_costs.module=vision.tp=1"),
    }
    (shards,) = [name for name in names if "jobs" in name]
    assert shards.endswith("_jobs")


def test_training_has_a_process_on_each_node(finished, cluster):
    assert {job["NodeList"] for job in cluster.ended_jobs() if job["Name"] == "train"} == {"node[1-2]"}


def test_jobs_that_measure_never_run_side_by_side(finished, cluster):
    jobs = [job for job in cluster.ended_jobs() if job["Name"].startswith(("profile_costs", "profile_l"))]
    spans = sorted((job["StartTime"], job["EndTime"]) for job in jobs)
    assert len(spans) >= 4
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_whole_run_prints_a_line_or_two_a_job(finished, clone):
    lines, _ = finished
    assert len(lines) < 120, "\n".join(lines)
    assert not [line for line in lines if "Traceback" in line or "it/s]" in line]
    assert len(pl.read_parquet(clone / "results/demo/candidates.parquet"))


def test_a_job_that_was_cancelled_is_not_submitted_again(finished, clone, cluster):
    before = len(cluster.ended_jobs())
    run = Run(clone, cluster, "results/again/costs/links.parquet", "--config", "run=again", "costs.repeats=3")
    # Its log is there once the job has read the config, with what stands on the command line.
    run.wait_for((clone / "results/again/logs/profile_links.log").exists, 120)
    (number,) = _jobs(cluster, "profile_links")
    cluster.ask("scancel", number)
    assert run.end(180) == 1
    said = [line for line in run.lines if "ended as CANCELLED" in line]
    assert len(said) == 1, run.lines
    assert f"Slurm job {number} (profile_links)" in said[0]
    assert len(cluster.ended_jobs()) == before + 1


def test_a_partition_that_is_not_there_is_one_line(finished, clone, cluster):
    target = "results/nowhere/costs/links.parquet"
    run = Run(clone, cluster, target, "--config", "run=nowhere", "costs.repeats=4", "slurm.partition=nowhere")
    assert run.end(120) == 1
    said = [line for line in run.lines if "Slurm refused the job profile_links" in line]
    assert len(said) == 1, run.lines
    assert "invalid partition" in said[0]
    assert len(run.lines) < 15, run.lines


def test_a_folder_that_init_began_is_planned_by_the_clusters_jobs(cluster, tmp_path):
    folder = tmp_path / "mine"
    start_folder(folder)
    (folder / "home").mkdir()
    make_demo_data(folder / "data", num_records=60)
    (folder / "mine.yaml").write_text(yaml.safe_dump(WHAT_IF))
    before = len(cluster.ended_jobs())
    run = Run(folder, cluster, "results/mine/plan.yaml", "--configfile", "mine.yaml")
    assert run.end(300) == 0, "\n".join(run.lines)
    plan = yaml.safe_load((folder / "results/mine/plan.yaml").read_text())
    assert plan["costs"] == "h100-80g, analytic"
    assert plan["baselines"][0]["plan"].startswith("monolithic: vision tp1 pp1 dp4 + llm tp1 pp1 dp4")
    assert [job["Name"] for job in cluster.ended_jobs()[before:]] == ["shards.1_jobs", "search_plan"]
