"""What is said of a machine, and what is missing there for which use."""

import dataclasses
import re

import pytest
from click.testing import CliRunner

from dflop.checks import machine as checks_machine
from dflop.checks.machine import Machine, findings, table
from dflop.cli import cli

NODE = Machine(
    python="3.11.7",
    packages={"torch": "2.11.0+cu130", "transformers": "5.23.0", "triton": "3.6.0"},
    cuda="13.0",
    nccl="2.28.9",
    driver="580.65",
    cards=("NVIDIA H100 80GB HBM3, 79.6 GiB",) * 2,
    num_present=2,
    has_hopper=True,
    attention="flash-attn 3",
    compilers={"CC": "/usr/bin/gcc", "CXX": "/usr/bin/g++"},
    has_python_header=True,
    interfaces={"lo": "unknown", "eth0": "up"},
    infiniband=("mlx5_0",),
    shm_bytes=64 * 2**30,
    memory_bytes=512 * 2**30,
    locked_bytes=-1,
    open_files=65536,
    cores=64,
)


def without(**changes: object) -> Machine:
    packages = NODE.packages | changes.pop("packages", {})
    return dataclasses.replace(NODE, packages=packages, **changes)


def test_a_whole_node_has_a_line_for_each_card_and_nothing_missing():
    said = table(NODE)
    assert said.count("NVIDIA H100") == 2
    assert re.search(r"^attention +flash-attn 3$", said, re.MULTILINE)
    assert re.search(r"^locked memory +unlimited$", said, re.MULTILINE)
    assert said.endswith("Nothing is missing.")


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (without(packages={"torch": "2.9.1"}), r"torch 2\.11 or newer.*found: 2\.9\.1"),
        (without(packages={"torch": None}), r"torch 2\.11 or newer.*found: none"),
        (without(packages={"transformers": None}), "pip install transformers"),
        (without(cards=(), cuda=None), r"use the 2 GPU\(s\) here: it is built without CUDA, and the driver is 580\.65"),
    ],
)
def test_without_what_is_needed_nothing_can_be_trained_and_it_is_said_first(machine, said):
    first, *_ = findings(machine)
    assert first.is_needed
    assert re.search(said, first.what)
    assert f"- NEEDED: {first.what}" in table(machine)


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (without(compilers={"CC": None, "CXX": None}), "a C compiler .* compiled layers"),
        (without(has_python_header=False), "Python.h .* compiled layers"),
        (without(packages={"triton": None}), "triton, for compiled layers"),
        (without(attention="flash-attn 2"), "flash-attn 3, for the quickest attention on Hopper"),
        (without(attention="torch varlen", has_hopper=False), r"quicker attention: pip install dflop\[gpu\]"),
        (without(interfaces={"lo": "unknown", "eth0": "down"}), "several nodes"),
        (without(locked_bytes=2**20), "InfiniBand"),
        (without(open_files=1024), r"open files \(1024\)"),
        (without(shm_bytes=2**26), r"/dev/shm \(0\.1 GiB\)"),
        (without(cards=(), num_present=0, driver=None), "a GPU, for `cluster.device: cuda`"),
    ],
)
def test_what_is_missing_for_some_uses_names_them(machine, said):
    (finding,) = findings(machine)
    assert not finding.is_needed
    assert re.search(said, finding.what)


def test_the_command_looks_at_this_machine_and_says_whether_there_is_a_gpu():
    ran = CliRunner().invoke(cli, ["doctor"])
    assert ran.exit_code == 0, ran.output
    assert re.search(r"^torch +\d", ran.output, re.MULTILINE)
    assert re.search(r"^card +(no GPU here|.*GiB)", ran.output, re.MULTILINE)
    assert re.search(r"^attention +(flash-attn|torch varlen|sdpa)", ran.output, re.MULTILINE)
    assert re.search(r"^cores +\d", ran.output, re.MULTILINE)


def test_the_command_fails_where_something_needed_is_missing(monkeypatch):
    monkeypatch.setattr(checks_machine, "look", lambda: without(packages={"torch": None}))
    ran = CliRunner().invoke(cli, ["doctor"])
    assert ran.exit_code == 1
    assert "NEEDED: torch" in ran.output
