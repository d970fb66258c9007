"""What ranks with GPUs find in their environment, and which cores they stay on."""

import os
import subprocess
import sys

import pytest

from dflop.base import numa
from dflop.base.gpu_environment import gpu_environment
from dflop.base.numa import cores_near, leave_cores_near, stay_near
from dflop.base.torchrun import run_ranks
from dflop.config import ClusterConfig

SET = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
    "NCCL_RAS_ENABLE": "0",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


@pytest.fixture
def environment_of_ranks(monkeypatch):
    """`environment_of_ranks(device)`: what the program that starts the ranks gets."""
    for name in (*SET, "PYTORCH_CUDA_ALLOC_CONF", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    start, found = subprocess.Popen, []

    def started(arguments, env, pass_fds):
        found.append(env)
        return start([sys.executable, "-c", ""], env=env)

    def environment(device):
        monkeypatch.setattr(subprocess, "Popen", started)
        run_ranks("any", {}, ClusterConfig(device=device, devices_per_node=1), num_nodes=1, per_node=1)
        return found.pop()

    return environment


def test_ranks_with_gpus_are_started_with_settings_that_ranks_on_cpus_have_not(environment_of_ranks):
    assert SET.items() <= environment_of_ranks("cuda").items()
    assert not SET.keys() & environment_of_ranks("cpu").keys()


def test_what_the_user_has_set_stays(environment_of_ranks, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    found = environment_of_ranks("cuda")
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512"
    assert "PYTORCH_ALLOC_CONF" not in found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_of_one_node_listen_on_loopback_whatever_reaches_other_nodes(environment_of_ranks, device, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    found = environment_of_ranks(device)
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("lo", "lo")


@pytest.mark.parametrize(
    ("named", "of_gloo"),
    [("ib0", "ib0"), ("=ib0", "ib0"), ("ib", None), ("^docker0", None), ("ib0,eth0", None), ("", None)],
)
def test_gloo_uses_the_interface_of_nccl_where_that_is_one(named, of_gloo):
    found = gpu_environment({"NCCL_SOCKET_IFNAME": named}, ["lo", "eth0", "ib0"])
    assert found.get("GLOO_SOCKET_IFNAME") == of_gloo
    assert "GLOO_SOCKET_IFNAME" not in gpu_environment(
        {"NCCL_SOCKET_IFNAME": named, "GLOO_SOCKET_IFNAME": "eth0"}, ["lo", "eth0", "ib0"]
    )


@pytest.mark.parametrize(("text", "cores"), [("0-2,8\n", {0, 1, 2, 8}), ("5\n", {5}), ("\n", set())])
def test_the_cores_beside_a_gpu_are_read_from_the_machine(text, cores, tmp_path):
    (tmp_path / "0000:0a:00.0").mkdir()
    (tmp_path / "0000:0a:00.0" / "local_cpulist").write_text(text)
    assert cores_near("0000:0a:00.0", tmp_path) == cores
    assert cores_near("0000:0b:00.0", tmp_path) == set()


@pytest.fixture
def moved(monkeypatch):
    """The cores that threads are moved to."""
    threads = {}
    monkeypatch.setattr(os, "sched_setaffinity", threads.__setitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("DFLOP_ALL_CORES", raising=False)
    yield threads
    os.environ.pop("DFLOP_ALL_CORES", None)


def test_a_rank_stays_on_the_cores_beside_its_gpu(moved, monkeypatch):
    sockets = {"0000:0a:00.0": {*range(8), 4095}, "0000:0b:00.0": {*range(8), 4095}, "0000:8a:00.0": {8, 9, 10, 11}}
    monkeypatch.setattr(numa, "cores_near", sockets.get)
    stay_near([*sockets], 1)
    assert os.getpid() in moved
    assert all(cores == set(range(8)) for cores in moved.values())
    leave_cores_near()  # as its loaders do
    assert set(moved[0]) == set(range(16))


def test_ranks_keep_all_cores_where_those_beside_their_gpus_are_few(moved, monkeypatch):
    monkeypatch.setattr(numa, "cores_near", lambda _: {12, 13, 14, 15, 16, 17, 18, 19})  # of which four are the job's
    stay_near(["0000:0a:00.0", "0000:0b:00.0"], 0)
    assert not moved


def test_a_rank_whose_gpu_is_not_known_to_the_machine_keeps_its_cores():
    before = os.sched_getaffinity(0)
    stay_near(["ffff:ff:1f.0"], 0)
    assert os.sched_getaffinity(0) == before
