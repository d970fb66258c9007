"""Kernels on disk are rebuilt when anything that they are made of changes, in whichever file it stands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dflop

PACKAGE = Path(dflop.__file__).parent

# A kernel that calls one of another file and reads a number there, and which of both it asks for.
CALLER = """
from callee import NUMBER, doubled
from dflop.base.kernels import kernel

@kernel
def answer(value):
    return helper(value)

@kernel
def helper(value):
    return doubled(value) + NUMBER
"""
CALLEE = """
from dflop.base.kernels import kernel

NUMBER = {number}

@kernel
def doubled(value):
    return {factor} * value
"""
SCRIPT = """
from caller import answer
print(f"{answer(10)}, read from disk: {sum(answer.stats.cache_hits.values())}")
"""


# Runs the scripts whose names it reads, each in a fork, and prints a line when one has ended. Numba is imported once.
FORKS = """
import os, runpy, sys
import numba, numpy, dflop.base.kernels
numba.njit(lambda value: 2.0 * value + 1)(1)  # what numba sets up before its first kernel takes a second
for line in sys.stdin:
    if not (fork := os.fork()):
        folder = line.strip()
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        runpy.run_path("script.py")
        sys.exit()
    print(os.waitpid(fork, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def forks():
    """`forks(folder, script)`: what the script prints in a process of its own that finds modules in the folder first.
    Python keeps no bytecode of these: it would not notice a file of the same size that is written anew within a
    second."""
    command = [sys.executable, "-B", "-c", FORKS]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run_forked(folder: Path, script: str) -> str:
            (folder / "script.py").write_text(script)
            print(folder, file=process.stdin, flush=True)
            assert int(process.stdout.readline()) == 0
            return (folder / "said").read_text().strip()

        yield run_forked
        process.stdin.close()


def run(folder: Path, script: str) -> str:
    """What the script prints in a new Python that finds modules in the folder first."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(PACKAGE.parent)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_changed_kernel_or_number_of_another_file_is_noticed_and_else_nothing_is_built_again(forks, tmp_path):
    (tmp_path / "caller.py").write_text(CALLER)

    def answer(**callee) -> str:
        (tmp_path / "callee.py").write_text(CALLEE.format(**callee))
        return forks(tmp_path, SCRIPT)

    assert answer(factor=2, number=1) == "21, read from disk: 0"
    assert answer(factor=2, number=1) == "21, read from disk: 1"
    assert answer(factor=30, number=1) == "301, read from disk: 0"
    assert answer(factor=30, number=400) == "700, read from disk: 0"
    assert answer(factor=30, number=400) == "700, read from disk: 1"


READER = """
from dflop.base.kernels import kernel

@kernel
def first_of(pair):
    return pair.first
"""
PAIRS = """
from typing import NamedTuple

class Pair(NamedTuple):
    {fields[0]}: float
    {fields[1]}: float
"""
READ = """
from pairs import Pair
from reader import first_of
print(f"{first_of(Pair(first=1.0, second=2.0))}, read from disk: {sum(first_of.stats.cache_hits.values())}")
"""


def test_fields_of_a_named_tuple_that_change_places_are_noticed(forks, tmp_path):
    (tmp_path / "reader.py").write_text(READER)

    def read(*fields: str) -> str:
        (tmp_path / "pairs.py").write_text(PAIRS.format(fields=fields))
        return forks(tmp_path, READ)

    assert read("first", "second") == "1.0, read from disk: 0"
    assert read("first", "second") == "1.0, read from disk: 1"
    assert read("second", "first") == "1.0, read from disk: 0"


def test_a_number_that_changes_in_one_file_of_the_package_changes_what_kernels_of_others_do(tmp_path):
    """A kernel of the orders asks whether a pass is a forward; which number that is stands elsewhere."""
    shutil.copytree(PACKAGE, tmp_path / "dflop", ignore=shutil.ignore_patterns("__pycache__"))
    script = """
import numpy as np
from dflop.step.orders import _in_rounds
zero = np.zeros(1, dtype=np.int64)
print(_in_rounds(zero, zero, 2, 2, 0)[0].tolist())
"""
    assert run(tmp_path, script) == "[0, 0, 0]"
    passes = tmp_path / "dflop" / "plan" / "passes.py"
    text = passes.read_text(encoding="utf-8")
    assert "= 0, 1" in text
    passes.write_text(text.replace("= 0, 1", "= 10, 11"), encoding="utf-8")
    assert run(tmp_path, script) == "[0, 2, 0]"


FILES = """
import numpy as np
from halves import half
print([half(dtype(7)) for dtype in (np.int64, np.float64)], sum(half.stats.cache_hits.values()))
"""
HALVES = """
from dflop.base.kernels import kernel

@kernel
def half(value):
    return value {operator} 2
"""


def test_machine_code_of_other_types_or_of_older_code_is_never_called(forks, tmp_path):
    """As where two processes compile at once: a file that is not what its name says counts as none."""
    (tmp_path / "halves.py").write_text(HALVES.format(operator="//"))
    assert forks(tmp_path, FILES) == "[3, 3.0] 0"
    assert forks(tmp_path, FILES) == "[3, 3.0] 2"
    first, second = sorted(tmp_path.rglob("*.nbc"))
    older = first.read_bytes(), second.read_bytes()
    first.write_bytes(older[1])
    second.write_bytes(b"")
    assert forks(tmp_path, FILES) == "[3, 3.0] 0"
    assert (first.read_bytes(), second.read_bytes()) == older
    (tmp_path / "halves.py").write_text(HALVES.format(operator="*"))
    assert forks(tmp_path, FILES) == "[14, 14.0] 0"
    first.write_bytes(older[0])
    assert forks(tmp_path, FILES) == "[14, 14.0] 1"
