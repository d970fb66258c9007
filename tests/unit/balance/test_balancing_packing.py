"""The fast packings always give a valid assignment, and LPT is as balanced as it promises."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dflop.balance import (
    BatchProblem,
    bucket_loads,
    check_assignment,
    descend,
    goal_s,
    least_bucket_s,
    lpt_buckets,
    random_buckets,
)
from dflop.base import UserError

# Nothing here is timed: the first example of a run may have to compile.
properties = settings(max_examples=60)


@st.composite
def problems(draw, max_samples=24, max_modules=3):
    num_dp_ranks = draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(1, min(4, max_samples // num_dp_ranks)))
    num_samples = draw(st.integers(num_dp_ranks * num_microbatches, max_samples))
    num_modules = draw(st.integers(1, max_modules))
    load = st.one_of(st.just(0.0), st.floats(1e-4, 10.0))
    return BatchProblem(
        loads_s=draw(arrays(np.float64, (num_samples, num_modules), elements=load)),
        llm_tokens=draw(arrays(np.int64, num_samples, elements=st.integers(0, 50))),
        num_dp_ranks=num_dp_ranks,
        num_microbatches=num_microbatches,
    )


def with_token_cap(problem, max_bucket_tokens):
    return BatchProblem(
        loads_s=problem.loads_s,
        llm_tokens=problem.llm_tokens,
        num_dp_ranks=problem.num_dp_ranks,
        num_microbatches=problem.num_microbatches,
        max_bucket_tokens=max_bucket_tokens,
    )


def realistic_problem(seed, *, num_samples=512, num_dp_ranks=4, num_microbatches=16):
    """Lognormal loads, encoder and LLM correlated, a fifth of the samples text-only."""
    rng = np.random.default_rng(seed)
    size = rng.normal(size=(num_samples, 2))
    size[:, 1] = 0.7 * size[:, 0] + 0.7 * size[:, 1]
    loads_s = np.exp(size * [0.6, 0.5]) * [0.008, 0.01]
    loads_s[rng.random(num_samples) < 0.2, 0] = 0.0
    return BatchProblem(
        loads_s=loads_s,
        llm_tokens=np.rint(loads_s[:, 1] * 1e5).astype(np.int64),
        num_dp_ranks=num_dp_ranks,
        num_microbatches=num_microbatches,
    )


def largest_s(problem, bucket):
    return bucket_loads(problem, bucket).max()


def smallest_possible_s(problem):
    """The optimum by trying everything."""
    best = np.inf
    for choice in itertools.product(range(problem.num_buckets), repeat=problem.num_samples):
        if len(set(choice)) == problem.num_buckets:
            best = min(best, largest_s(problem, np.array(choice)))
    return best


@properties
@given(problem=problems(), seed=st.integers(0, 100))
def test_both_policies_put_every_sample_in_one_bucket_and_leave_none_empty(problem, seed):
    for bucket in (random_buckets(problem, np.random.default_rng(seed)), lpt_buckets(problem)):
        check_assignment(problem, bucket)
        assert largest_s(problem, bucket) >= least_bucket_s(problem) * (1 - 1e-9)


@properties
@given(problem=problems(), seed=st.integers(0, 100))
def test_random_buckets_differ_by_one_sample_at_most(problem, seed):
    count = np.bincount(random_buckets(problem, np.random.default_rng(seed)))
    assert count.max() - count.min() <= 1


@properties
@given(problem=problems(), seed=st.integers(0, 100))
def test_the_descent_enlarges_no_bucket_beyond_the_goal_or_the_largest(problem, seed):
    start = random_buckets(problem, np.random.default_rng(seed))
    allowed_s = max(largest_s(problem, start), goal_s(problem))
    assert largest_s(problem, descend(problem, start)) <= allowed_s * (1 + 1e-9)


@properties
@given(problem=problems(), seed=st.integers(0, 100))
def test_a_bucket_above_the_goal_is_one_that_no_swap_improves(problem, seed):
    bucket = descend(problem, random_buckets(problem, np.random.default_rng(seed)))
    load = bucket_loads(problem, bucket)
    largest = int(load.max(axis=1).argmax())
    for i in np.flatnonzero(bucket == largest):
        for j in np.flatnonzero(bucket != largest):
            swapped = bucket.copy()
            swapped[[i, j]] = bucket[[j, i]]
            after = bucket_loads(problem, swapped)[[largest, bucket[j]]].max()
            assert after >= load.max() * (1 - 1e-8) or load.max() <= goal_s(problem) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_no_swap_or_move_that_keeps_the_largest_bucket_evens_out_any_further(seed):
    problem = realistic_problem(seed, num_samples=90, num_dp_ranks=2, num_microbatches=9)
    bucket = descend(problem, random_buckets(problem, np.random.default_rng(seed)))
    load = bucket_loads(problem, bucket)
    mean_s = load.mean(axis=0)
    ceiling_s = max(load.max(), goal_s(problem)) * (1 - 1e-6)

    def check(changed):
        after = bucket_loads(problem, changed)
        different = (after != load).any(axis=1)
        gain = ((load / mean_s) ** 2).sum() - ((after / mean_s) ** 2).sum()
        assert gain < 1e-6 or after[different].max() >= ceiling_s

    for i, j in itertools.combinations(range(problem.num_samples), 2):
        swapped = bucket.copy()
        swapped[[i, j]] = bucket[[j, i]]
        check(swapped)
    for i, b in itertools.product(range(problem.num_samples), range(problem.num_buckets)):
        if (bucket == bucket[i]).sum() > 1:
            moved = bucket.copy()
            moved[i] = b
            check(moved)


@settings(max_examples=25)
@given(problem=problems(max_samples=6, max_modules=1))
def test_for_one_module_the_packing_is_within_a_third_of_the_optimum(problem):
    if problem.num_buckets <= 4:
        assert largest_s(problem, lpt_buckets(problem)) <= smallest_possible_s(problem) * 4 / 3 * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_realistic_batch_meets_the_goal(seed):
    problem = realistic_problem(seed)
    assert largest_s(problem, lpt_buckets(problem)) <= goal_s(problem)


@pytest.mark.parametrize("seed", range(5))
def test_the_lighter_module_is_balanced_too(seed):
    problem = realistic_problem(seed)
    load = bucket_loads(problem, lpt_buckets(problem))
    assert (load.max(axis=0) <= np.maximum(load.mean(axis=0), problem.loads_s.max(axis=0)) * 1.02).all()


@pytest.mark.parametrize(("num_samples", "num_microbatches"), [(64, 4), (64, 16), (256, 16), (512, 16)])
def test_a_packed_batch_is_never_worse_than_a_random_one(num_samples, num_microbatches):
    for seed in range(10):
        problem = realistic_problem(seed, num_samples=num_samples, num_microbatches=num_microbatches)
        unscheduled = random_buckets(problem, np.random.default_rng(seed))
        allowed_s = max(largest_s(problem, unscheduled), goal_s(problem))
        assert largest_s(problem, lpt_buckets(problem)) <= allowed_s * (1 + 1e-9)


def test_equal_problems_give_equal_answers():
    first, second = lpt_buckets(realistic_problem(3)), lpt_buckets(realistic_problem(3))
    np.testing.assert_array_equal(first, second)
    drawn = [random_buckets(realistic_problem(3), np.random.default_rng(7)) for _ in range(2)]
    np.testing.assert_array_equal(*drawn)


def test_a_tight_token_cap_changes_a_random_batch_only_as_far_as_needed():
    problem = realistic_problem(0)
    free = random_buckets(problem, np.random.default_rng(0))
    tokens = np.bincount(free, weights=problem.llm_tokens)
    capped = with_token_cap(problem, int(np.sort(tokens)[-3]))
    changed = random_buckets(capped, np.random.default_rng(0)) != free
    assert 0 < changed.sum() < 20


def test_samples_without_any_load_still_fill_every_bucket():
    problem = BatchProblem(
        loads_s=np.zeros((8, 2)), llm_tokens=np.zeros(8, dtype=np.int64), num_dp_ranks=2, num_microbatches=4
    )
    assert sorted(lpt_buckets(problem)) == list(range(8))


def test_a_cap_that_no_assignment_meets_says_what_to_change():
    problem = BatchProblem(
        loads_s=np.ones((3, 1)),
        llm_tokens=np.array([6, 6, 6]),
        num_dp_ranks=1,
        num_microbatches=2,
        max_bucket_tokens=9,
    )
    with pytest.raises(UserError, match=r"within 9 LLM tokens \(the batch fills 100%.*larger num_microbatches"):
        lpt_buckets(problem)
