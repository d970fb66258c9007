"""`schedule.deterministic`: equal runs have equal schedules to the bit, in any process, however busy the machine."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import polars as pl
import pytest
from drawn_problems import hard_problem

from dflop.balance import CbcProcess
from dflop.config import load_config
from dflop.schedule.service import open_scheduler

SPIN = "while True: pass"
# Two like samples a bucket: no packing is near the bound.
HARD_FOR_CBC = {"llm_pp": 1, "num_microbatches": 20, "batch_size": 40, "alike": True}


@contextmanager
def beside(num_spinning):
    """So many processes take the cores from whatever runs meanwhile."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(num_spinning)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def preview(run, out, num_spinning):
    """`dflop schedule` beside so many processes that take the cores from it."""
    command = [sys.executable, "-m", "dflop.cli", "schedule", "--config", json.dumps(run.config), "--batches", "2"]
    for name, path in (run.paths | {"out": out}).items():
        command += [f"--{name}", str(path)]
    with beside(num_spinning):
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return pl.read_parquet(out), pl.read_parquet(out.with_name(f"{out.stem}_stages.parquet"))


@pytest.mark.parametrize("policy", ["search", pytest.param("ilp", marks=pytest.mark.exhaustive)])
def test_two_runs_agree_to_the_bit_whatever_else_the_machine_does(make_run, tmp_path, policy):
    run = make_run(
        **HARD_FOR_CBC,
        policy=policy,
        deterministic=True,
        time_limit_s=0.2,
    )
    (samples, stages), (again, stages_again) = (preview(run, tmp_path / f"{n}.parquet", n) for n in (0, 1))
    assert samples.equals(again)
    assert stages.equals(stages_again)


def test_in_that_case_cbc_has_work_to_do_and_is_not_ended_by_a_clock(make_run):
    run = make_run(**HARD_FOR_CBC, policy="ilp", deterministic=True, time_limit_s=0.2)
    with open_scheduler(load_config(run.config), **run.paths).open() as scheduler:
        statuses = [scheduler.schedule(step).status for step in range(3)]
    assert all(re.search("ilp (good_enough|improved|no_gain|optimal)", status) for status in statuses), statuses
    assert any(re.search("ilp (improved|no_gain|optimal)", status) for status in statuses), statuses


def test_cbc_finds_the_same_to_the_bit_where_its_work_is_counted():
    """Alone, and beside processes that take the cores from it; it finds something, and proves nothing."""
    problem, start = hard_problem()
    found = []
    for num_spinning in (0, 1):
        with beside(num_spinning), CbcProcess() as cbc:
            found.append(cbc.solve(problem, start, time_limit_s=0.5, counts_work=True))
    assert [result.status for result in found] == ["improved", "improved"]
    np.testing.assert_array_equal(found[0].bucket, found[1].bucket)
