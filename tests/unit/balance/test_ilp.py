"""CBC improves an assignment or leaves it alone; no way in which it fails reaches the caller as an exception."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from drawn_problems import hard_problem, make_problem

import dflop.balance.ilp as ilp
from dflop.balance import (
    CbcProcess,
    bucket_loads,
    check_assignment,
    goal_s,
    random_buckets,
)

WORKER = Path(ilp.__file__).with_name("cbc_process.py")


@pytest.fixture(scope="module")
def cbc():
    with CbcProcess() as process:
        yield process


def smallest_possible_s(problem):
    best = np.inf
    for choice in itertools.product(range(problem.num_buckets), repeat=problem.num_samples):
        bucket = np.array(choice)
        tokens = np.bincount(bucket, weights=problem.llm_tokens, minlength=problem.num_buckets)
        fits = problem.max_bucket_tokens is None or tokens.max() <= problem.max_bucket_tokens
        if fits and len(set(choice)) == problem.num_buckets:
            best = min(best, bucket_loads(problem, bucket).max())
    return best


def assert_solved(problem, result):
    """The search stops at the optimum, or at the goal where that comes first."""
    optimum_s = smallest_possible_s(problem)
    if result.status == "optimal":
        assert result.objective_s == pytest.approx(optimum_s, rel=1e-3)
    else:
        assert optimum_s <= result.objective_s * (1 + 1e-9)
        assert result.objective_s <= goal_s(problem) * (1 + 1e-3)


def pid_once_started(cbc: CbcProcess) -> int:
    """The child's process, which has just answered: a small problem, for which it may take its time."""
    problem = make_problem(0, num_samples=7, num_microbatches=3)
    result = cbc.solve(problem, random_buckets(problem, np.random.default_rng(0)), time_limit_s=60.0)
    assert result.status not in {"timeout", "died"}
    assert cbc.pid is not None
    return cbc.pid


@pytest.mark.parametrize("seed", range(6))
def test_a_small_batch_is_solved_to_its_optimum(cbc, seed):
    problem = make_problem(seed, num_samples=7, num_microbatches=3)
    result = cbc.solve(problem, random_buckets(problem, np.random.default_rng(seed)), time_limit_s=5.0)
    assert_solved(problem, result)


@pytest.mark.parametrize("seed", range(3))
def test_repeated_shapes_are_counted_and_still_solved_to_the_optimum(cbc, seed):
    problem = make_problem(seed, num_samples=8, num_microbatches=3, num_shapes=3)
    result = cbc.solve(problem, random_buckets(problem, np.random.default_rng(seed)), time_limit_s=5.0)
    assert_solved(problem, result)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_under_a_token_cap_keeps_the_cap(cbc, seed):
    free = make_problem(seed, num_samples=7, num_microbatches=3)
    cap = int(free.llm_tokens.sum()) // 3 + int(free.llm_tokens.max()) // 4
    problem = make_problem(seed, num_samples=7, num_microbatches=3, max_bucket_tokens=cap)
    result = cbc.solve(problem, random_buckets(problem, np.random.default_rng(seed)), time_limit_s=5.0)
    check_assignment(problem, result.bucket)
    assert_solved(problem, result)


@pytest.mark.parametrize("seed", range(5))
def test_buckets_of_unlike_wanted_sizes_come_as_near_to_them_as_any_assignment(cbc, seed):
    problem = make_problem(seed, num_samples=8, num_microbatches=3)
    share = np.array([[0.4, 0.7], [1.5, 1.4], [1.1, 0.9]])
    start = random_buckets(problem, np.random.default_rng(seed))
    result = cbc.solve(problem, start, time_limit_s=5.0, share=share)
    filled = (share.max() - share) * problem.loads_s.sum(axis=0) / 3
    peaks = [
        (bucket_loads(problem, np.array(choice)) + filled).max()
        for choice in itertools.product(range(3), repeat=8)
        if len(set(choice)) == 3
    ]
    goal = goal_s(problem) * share.max()
    assert result.objective_s == pytest.approx((bucket_loads(problem, result.bucket) + filled).max())
    assert result.objective_s <= max(goal, min(peaks) * 1.001)


@pytest.mark.parametrize("seed", range(3))
def test_a_larger_batch_is_valid_and_never_worse_than_its_start(cbc, seed):
    problem, start = hard_problem(seed)
    result = cbc.solve(problem, start, time_limit_s=0.5)
    check_assignment(problem, result.bucket)
    assert result.objective_s == bucket_loads(problem, result.bucket).max()
    if result.status == "improved":
        assert result.objective_s < bucket_loads(problem, start).max()
    else:
        assert result.status == "no_gain"
        assert result.bucket is start


def test_a_bad_start_is_improved(cbc):
    problem, _ = hard_problem()
    start = random_buckets(problem, np.random.default_rng(0))
    result = cbc.solve(problem, start, time_limit_s=0.5)
    assert result.status == "improved"
    assert result.objective_s < bucket_loads(problem, start).max()


def test_no_time_means_no_gain(cbc):
    problem, start = hard_problem()
    result = cbc.solve(problem, start, time_limit_s=1e-6)
    assert (result.status, result.bucket is start) == ("no_gain", True)


def test_a_start_that_meets_the_goal_needs_no_solver():
    problem = make_problem(0, num_samples=3, num_microbatches=3)
    with CbcProcess() as cbc:
        result = cbc.solve(problem, np.array([0, 1, 2]), time_limit_s=1.0)
        assert (result.status, cbc.pid) == ("good_enough", None)


def test_an_oversized_batch_is_not_tried():
    problem = make_problem(0, num_samples=1024, num_microbatches=64)
    start = random_buckets(problem, np.random.default_rng(0))
    with CbcProcess() as cbc:
        result = cbc.solve(problem, start, time_limit_s=1.0)
        assert (result.status, result.bucket is start, cbc.pid) == ("too_large", True, None)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGSTOP, "timeout"), (signal.SIGKILL, "died")])
def test_a_child_that_hangs_or_is_dead_is_counted_once_and_replaced(sent, status):
    problem, start = hard_problem()
    with CbcProcess() as cbc:
        spoiled = pid_once_started(cbc)
        os.kill(spoiled, sent)
        result = cbc.solve(problem, start, time_limit_s=0.05)
        assert (result.status, result.bucket is start) == (status, True)
        assert cbc.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(spoiled, 0)
        assert pid_once_started(cbc) != spoiled


def test_a_request_larger_than_the_pipe_does_not_block_on_a_hanging_child():
    problem = make_problem(0, num_samples=4096, num_microbatches=8)
    start = random_buckets(problem, np.random.default_rng(0))
    with CbcProcess() as cbc:
        os.kill(pid_once_started(cbc), signal.SIGSTOP)
        assert cbc.solve(problem, start, time_limit_s=0.05).status == "timeout"


def test_without_a_cbc_library_the_start_comes_back_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PMIP_CBC_LIBRARY", str(tmp_path / "libCbc.so"))
    problem, start = hard_problem()
    with CbcProcess() as cbc:
        for _ in range(2):
            result = cbc.solve(problem, start, time_limit_s=1.0)
            assert (result.status, result.bucket is start) == ("unavailable", True)
            assert "cbclib" in result.detail


def test_a_python_that_does_not_start_is_unavailable(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    problem, start = hard_problem()
    with CbcProcess() as cbc:
        result = cbc.solve(problem, start, time_limit_s=1.0)
    assert (result.status, result.bucket is start) == ("unavailable", True)
    assert "No such file" in result.detail


def test_the_child_ends_with_its_parent_even_amid_a_solve():
    problem, start = hard_problem()
    request = {
        "loads": (problem.loads_s / goal_s(problem)).tolist(),
        "filled": np.zeros((problem.num_buckets, 2)).tolist(),
        "tokens": problem.llm_tokens.tolist(),
        "kind": list(range(problem.num_samples)),
        "bucket": start.tolist(),
        "num_buckets": problem.num_buckets,
        "max_bucket_tokens": None,
        "time_limit_s": 300.0,
        "num_solves": None,
    }
    with subprocess.Popen([sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert json.loads(child.stdout.readline()) == {"ready": True}
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.close()
        assert child.wait() == 0
        assert child.stdout.read() == b""


def test_a_broken_request_is_answered_with_its_error_and_the_child_lives_on():
    with subprocess.Popen([sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        for _ in range(2):
            child.stdin.write(b'{"loads": []}\n')
            child.stdin.flush()
            assert "missing" in json.loads(child.stdout.readline())["error"]
        child.stdin.close()
        assert child.wait() == 0
