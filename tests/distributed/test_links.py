"""Links measured for real: gloo ranks on this machine, as one node and as if they were two."""

import json
import os
import subprocess
import sys

import polars as pl
import pytest
import torch
from processes import run_command

from dflop.base import UserError
from dflop.cli import cli
from dflop.store import LINKS_SCHEMA

pytestmark = pytest.mark.serial

SIZES = [1024 * 4**power for power in range(6)]


def arguments_of(out, *arguments: str, **cluster) -> list[str]:
    config = json.dumps({"cluster": cluster, "costs": {"repeats": 2}})
    return ["profile-links", "--config", config, "--out", str(out), *arguments]


def test_two_ranks_measure_their_link_over_sizes(tmp_path):
    out, log = tmp_path / "costs/links.parquet", tmp_path / "log"
    code = run_command(arguments_of(out, "--max-bytes", str(2**20), devices_per_node=2), log)
    assert code == 0, log.read_text()
    assert "48 measurements" in log.read_text()
    frame = pl.read_parquet(out)
    assert frame.schema == LINKS_SCHEMA
    assert sorted(frame.drop("seconds").rows()) == sorted(
        (kind, "intra", 2, size, repeat)
        for kind in ("host", "p2p", "exchange", "gradient_sync")
        for size in SIZES
        for repeat in range(2)
    )
    assert (frame["seconds"] > 1e-6).all()
    assert list(out.parent.iterdir()) == [out]


def test_too_few_gpus_are_said_once_and_nothing_is_written(tmp_path):
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has them")
    arguments = arguments_of(tmp_path / "links.parquet", device="cuda", devices_per_node=2)
    done = subprocess.run([sys.executable, "-m", "dflop.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("2 rank(s) of this node want a GPU each") == 1
    assert f"torch finds {torch.cuda.device_count()} GPU(s) here" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("dflop: ")
    assert list(tmp_path.iterdir()) == []


# `measure REQUEST`: what a command of dflop does on one of two nodes.
MEASURE = """
import json, pathlib, sys
from dflop.base.torchrun import run_ranks
from dflop.config import ClusterConfig
request = json.loads(sys.argv[1])
size = {"num_nodes": 2, "per_node": 2, "shared": pathlib.Path(request["out"]).parent}
sys.exit(run_ranks("dflop.costs.links", request, ClusterConfig(devices_per_node=2), **size)[0])
"""


def measure_briefly(tmp_path) -> pl.DataFrame:
    """What two ranks of each of two nodes write, where a stub for `scontrol` says that these are at loopback."""
    request = {"device": "cpu", "repeats": 1, "max_bytes": 4096, "out": str(tmp_path / "costs/links.parquet")}
    command = [sys.executable, "-c", MEASURE, json.dumps(request)]
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.1\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    step = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    nodes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | step | {"SLURM_PROCID": str(node)},
        )
        for node in range(2)
    ]
    try:
        outputs = [node.communicate()[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    assert not any(node.returncode for node in nodes), "\n".join(outputs)
    assert [path.name for path in (tmp_path / "costs").iterdir()] == ["links.parquet"]
    return pl.read_parquet(tmp_path / "costs/links.parquet")


@pytest.mark.exhaustive
def test_nodes_of_a_slurm_step_measure_inside_one_of_them_and_between_them(tmp_path):
    """Rank 0 takes no part in the group at their border."""
    frame = measure_briefly(tmp_path)
    assert frame.select("kind", "scope", "num_ranks").unique(maintain_order=True).rows() == [
        *(("host", "intra", 2), ("p2p", "intra", 2), ("exchange", "intra", 2), ("gradient_sync", "intra", 2)),
        *(("p2p", "inter", 2), ("gradient_sync", "inter", 2), ("gradient_sync", "inter", 4)),
    ]
    assert (frame["seconds"] > 0).all()


def test_one_device_alone_has_a_link_to_the_host(tmp_path):
    out, log = tmp_path / "links.parquet", tmp_path / "log"
    code = run_command(arguments_of(out, "--max-bytes", str(2**20), devices_per_node=1), log)
    assert code == 0, log.read_text()
    frame = pl.read_parquet(out)
    assert sorted(frame.drop("seconds").rows()) == [
        ("host", "intra", 1, size, repeat) for size in SIZES for repeat in range(2)
    ]
    assert (frame["seconds"] > 0).all()


def test_several_nodes_of_gpus_want_srun(tmp_path):
    with pytest.raises(UserError, match="run this inside `srun`"):
        cli.main(arguments_of(tmp_path / "links.parquet", device="cuda", num_nodes=2), standalone_mode=False)
    assert list(tmp_path.iterdir()) == []
