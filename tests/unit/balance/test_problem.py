"""A batch problem refuses what cannot be scheduled, and an assignment is checked before anyone uses it."""

import numpy as np
import pytest

from dflop.balance import (
    BatchProblem,
    bucket_loads,
    check_assignment,
    least_bucket_s,
)
from dflop.base import UserError


def make_problem(loads_s, *, llm_tokens=None, num_dp_ranks=1, num_microbatches=2, max_bucket_tokens=None):
    loads_s = np.asarray(loads_s, dtype=np.float64)
    return BatchProblem(
        loads_s=loads_s,
        llm_tokens=np.ones(len(loads_s), dtype=np.int64) if llm_tokens is None else np.asarray(llm_tokens),
        num_dp_ranks=num_dp_ranks,
        num_microbatches=num_microbatches,
        max_bucket_tokens=max_bucket_tokens,
    )


def test_loads_are_summed_per_bucket_and_module():
    problem = make_problem([[1, 10], [2, 20], [4, 40]])
    np.testing.assert_array_equal(bucket_loads(problem, np.array([1, 0, 1])), [[2, 20], [5, 50]])


def test_the_lower_bound_is_the_mean_bucket_of_the_busiest_module():
    assert least_bucket_s(make_problem([[1, 3], [1, 3], [1, 3], [1, 3]])) == 6


def test_the_lower_bound_is_the_largest_sample_where_that_exceeds_the_mean_bucket():
    assert least_bucket_s(make_problem([[9, 1], [1, 3], [1, 3]])) == 9


def test_too_few_samples_say_which_numbers_would_do():
    with pytest.raises(UserError, match=r"16 samples cannot fill 24 buckets .*num_microbatches <= 2 or .*size >= 24"):
        make_problem(np.ones((16, 2)), num_dp_ranks=6, num_microbatches=4)


def test_fewer_samples_than_dp_ranks_leave_only_the_batch_size_as_a_way_out():
    with pytest.raises(UserError, match=r"use train\.global_batch_size >= 8"):
        make_problem(np.ones((3, 1)), num_dp_ranks=4, num_microbatches=2)


def test_a_sample_beyond_the_token_cap_is_named():
    with pytest.raises(UserError, match=r"sample 1 of the batch has 9000 LLM tokens.*8192"):
        make_problem(np.ones((2, 1)), llm_tokens=[1, 9000], max_bucket_tokens=8192)


def test_a_batch_with_more_tokens_than_all_buckets_hold_is_refused():
    with pytest.raises(UserError, match="has 30 LLM tokens, but 2 buckets of at most 12 tokens hold 24"):
        make_problem(np.ones((3, 1)), llm_tokens=[10, 10, 10], max_bucket_tokens=12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_an_impossible_load_names_its_sample_and_module(bad):
    with pytest.raises(ValueError, match=r"sample 1 has a load of .* s in module 0"):
        make_problem([[1, 1], [bad, 1]])


@pytest.mark.parametrize(
    ("loads_s", "llm_tokens"),
    [(np.ones(3), np.ones(3, int)), (np.ones((3, 0)), np.ones(3, int)), (np.ones((3, 1)), np.ones(2, int))],
)
def test_arrays_of_the_wrong_shape_are_refused(loads_s, llm_tokens):
    with pytest.raises(ValueError, match="must be"):
        make_problem(loads_s, llm_tokens=llm_tokens)


def test_fractional_tokens_are_refused():
    with pytest.raises(ValueError, match="integers, not float64"):
        make_problem(np.ones((2, 1)), llm_tokens=[1.5, 2.0])


@pytest.mark.parametrize(
    ("bucket", "violation"),
    [
        ([0, 1], "3 samples needs as many integers"),
        ([0.0, 1.0, 1.0], "not float64"),
        ([0, 1, 2], "sample 2 is in bucket 2"),
        ([0, -1, 1], "sample 1 is in bucket -1"),
        ([1, 1, 1], "bucket 0 is empty"),
        ([0, 1, 1], "bucket 1 has 9 LLM tokens, more than 8"),
    ],
)
def test_a_broken_assignment_names_what_is_violated(bucket, violation):
    problem = make_problem(np.ones((3, 1)), llm_tokens=[1, 4, 5], max_bucket_tokens=8)
    with pytest.raises(ValueError, match=violation):
        check_assignment(problem, np.array(bucket))


def test_a_valid_assignment_passes():
    problem = make_problem(np.ones((3, 1)), llm_tokens=[1, 4, 5], max_bucket_tokens=8)
    check_assignment(problem, np.array([0, 0, 1]))
