"""Links measured for real: gloo ranks on this machine, as one node and as if they were two."""

import json
import subprocess
import sys

import polars as pl
import pytest
import torch

from dflop.store import LINKS_SCHEMA

pytestmark = pytest.mark.serial

SIZES = [1024 * 4**power for power in range(6)]


def profile_links(out, *arguments: str, **cluster) -> subprocess.CompletedProcess:
    config = json.dumps({"cluster": cluster, "costs": {"repeats": 2}})
    command = [sys.executable, "-m", "dflop.cli", "profile-links", "--config", config, "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_two_ranks_measure_their_link_over_sizes(tmp_path):
    out = tmp_path / "costs/links.parquet"
    done = profile_links(out, "--max-bytes", str(2**20), devices_per_node=2)
    assert done.returncode == 0, done.stderr
    assert "24 measurements" in done.stdout
    frame = pl.read_parquet(out)
    assert frame.schema == LINKS_SCHEMA
    assert sorted(frame.drop("seconds").rows()) == sorted(
        (kind, "intra", 2, size, repeat) for kind in ("p2p", "gradient_sync") for size in SIZES for repeat in range(2)
    )
    assert (frame["seconds"] > 1e-6).all()
    assert list(out.parent.iterdir()) == [out]


def test_too_few_gpus_are_said_once(tmp_path):
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has them")
    done = profile_links(tmp_path / "links.parquet", device="cuda", devices_per_node=2)
    assert done.returncode == 2
    assert done.stderr.count("2 rank(s) of this node want a GPU each") == 1


def measure_directly(tmp_path, *torchrun: str, num_nodes: int = 1) -> pl.DataFrame:
    """What the ranks of these torchruns, one a node, write."""
    request = {"device": "cpu", "repeats": 1, "max_bytes": 4096, "out": str(tmp_path / "links.parquet")}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", *torchrun),
        *("--module", "dflop.costs.links", json.dumps(request)),
    ]
    nodes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(num_nodes)
    ]
    try:
        outputs = [node.communicate()[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    assert not any(node.returncode for node in nodes), "\n".join(outputs)
    return pl.read_parquet(tmp_path / "links.parquet")


def test_nodes_measure_inside_one_of_them_and_between_them(tmp_path):
    """Two torchruns of two ranks meet as two nodes would; rank 0 takes no part in the group at their border."""
    frame = measure_directly(
        tmp_path,
        *("--nnodes=2", "--nproc-per-node=2"),
        *("--rdzv-id=links", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29411"),
        num_nodes=2,
    )
    assert frame.select("kind", "scope", "num_ranks").unique(maintain_order=True).rows() == [
        *(("p2p", "intra", 2), ("gradient_sync", "intra", 2)),
        *(("p2p", "inter", 2), ("gradient_sync", "inter", 2), ("gradient_sync", "inter", 4)),
    ]
    assert (frame["seconds"] > 0).all()


def test_one_device_alone_leaves_an_empty_file_with_the_right_columns(tmp_path):
    frame = measure_directly(tmp_path, "--standalone", "--nproc-per-node=1")
    assert frame.equals(pl.DataFrame(schema=LINKS_SCHEMA))
    assert frame.schema == LINKS_SCHEMA


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        pytest.param(
            *({"device": "cuda"}, "torch finds 0 GPU(s) here"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"device": "cuda", "num_nodes": 2}, "run this inside `srun`"),
    ],
    ids=["no GPU", "several nodes of GPUs without srun"],
)
def test_what_is_missing_is_said_and_nothing_is_written(tmp_path, cluster, said):
    done = profile_links(tmp_path / "links.parquet", **cluster)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.splitlines()[-1].startswith("dflop: ")
    assert list(tmp_path.iterdir()) == []
