"""Runs of `dflop train` with real processes, for several tests: plans by hand, starting, waiting, and finding ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import yaml
from processes import run_command

from dflop.plan import Grid, Plan, load_plan


def plan_file(
    folder: Path,
    *,
    vision_dp: int = 1,
    llm_dp: int = 1,
    llm_pp: int = 1,
    llm_tp: int = 1,
    llm_cp: int = 1,
    num_microbatches: int = 2,
    schedule: str = "1f1b",
    placement: str = "disjoint",
    sharding: str = "optimizer",
    offloads_optimizer: bool = False,
) -> Path:
    is_shared, llm_ranks = placement == "colocated", llm_dp * llm_pp * llm_tp
    plan = Plan(
        placement=placement,
        grids=(
            Grid(module="vision", num_ranks=llm_ranks if is_shared else vision_dp, sharding=sharding),
            Grid(
                module="llm",
                num_ranks=llm_ranks,
                tp=llm_tp,
                pp=llm_pp,
                cp=llm_cp,
                rank_offset=0 if is_shared else vision_dp,
                sharding=sharding if llm_pp == 1 else "optimizer",
            ),
        ),
        num_microbatches=num_microbatches,
        schedule=schedule,
        offloads_optimizer=offloads_optimizer,
    )
    sizes = f"{vision_dp}-{llm_dp}-{llm_pp}-{llm_tp}-{llm_cp}"
    path = folder / f"plan-{placement}-{sizes}-{schedule}-{sharding}-{offloads_optimizer}.yaml"
    path.write_text(yaml.safe_dump({"plan": plan.to_dict()}))
    return path


def train(
    folder: Path,
    config: dict,
    plan: Path,
    out: Path,
    *,
    num_nodes: int = 1,
    fails: bool = False,
    before: Callable[[int], object] | None = None,
    **train: object,
) -> list[dict]:
    """Run `dflop train` with one process a rank; returns the lines of metrics.jsonl. What it prints is in `out`/log.

    Only several nodes are torchrun's. Of one, each rank first calls `before(rank)`.
    """
    if num_nodes > 1:
        code = end_run(start_run(folder, config, plan, out, num_nodes=num_nodes, **train), out)
    else:
        code = run_command(_arguments(folder, config, plan, out, 1, train), out / "log", before)
    assert (code != 0) == fails, (out / "log").read_text()
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def start_run(
    folder: Path,
    config: dict,
    plan: Path,
    out: Path,
    *,
    num_nodes: int = 1,
    within: Sequence[str] = (),
    **train: object,
) -> subprocess.Popen:
    """Start the real command, which starts torchrun, `within` another command, if one is given."""
    command = [*within, sys.executable, "-m", "dflop.cli", *_arguments(folder, config, plan, out, num_nodes, train)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _arguments(folder: Path, config: dict, plan: Path, out: Path, num_nodes: int, train: dict) -> list[str]:
    cluster = config["cluster"] | {"num_nodes": num_nodes, "devices_per_node": load_plan(plan).world_size // num_nodes}
    whole = config | {"cluster": cluster, "train": config["train"] | train}
    return [
        *("train", "--config", json.dumps(whole), "--out", str(out), "--plan", str(plan)),
        *("--shapes", str(folder / "shapes.duckdb"), "--costs", str(folder / "costs.duckdb")),
    ]


def end_run(process: subprocess.Popen, out: Path) -> int:
    """Wait for a run to end; returns its exit code. What it printed is in `out`/log."""
    try:
        output, _ = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    out.mkdir(exist_ok=True)
    (out / "log").write_text(output)
    return process.returncode


def wait_for_steps(process: subprocess.Popen, out: Path, num_steps: int) -> None:
    """Return when a run, which must not end before, has taken so many steps."""
    metrics = out / "metrics.jsonl"
    try:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < num_steps:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
    except BaseException:
        os.killpg(process.pid, signal.SIGINT)  # which ends its ranks
        process.wait()
        raise


def listening(command: int) -> list[tuple[str, int]]:
    """Addresses and ports at which a command, and all that it has started, listen for TCP."""
    started = psutil.Process(command)
    return [
        tuple(connection.laddr)
        for process in [started, *started.children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def process_of_rank(rank: int, out: Path) -> int:
    """The process of a rank of the run that writes to `out`, as its command line and environment say."""
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"dflop.train.rank" in (command := path.read_bytes())
        and str(out).encode() in command
        and f"\0RANK={rank}\0".encode() in path.with_name("environ").read_bytes()
    ]
    assert len(found) == 1, found
    return found[0]
