"""Balancing problems drawn at random, easy and hard ones, for tests of the solver and of what repeats its answers."""

import numpy as np

from dflop.balance import BatchProblem, bucket_loads, goal_s, lpt_buckets


def make_problem(seed, *, num_samples, num_microbatches, spread=0.5, max_bucket_tokens=None, num_shapes=None):
    """Lognormal loads in two modules; with `num_shapes` the samples repeat that many shapes."""
    rng = np.random.default_rng(seed)
    loads_s = np.exp(rng.normal(size=(num_samples, 2)) * spread) * [0.008, 0.01]
    if num_shapes is not None:
        loads_s = loads_s[rng.integers(num_shapes, size=num_samples)]
    return BatchProblem(
        loads_s=loads_s,
        llm_tokens=np.rint(loads_s[:, 1] * 1e4).astype(np.int64),
        num_dp_ranks=1,
        num_microbatches=num_microbatches,
        max_bucket_tokens=max_bucket_tokens,
    )


def hard_problem(seed=0):
    """Its packing misses the goal, and CBC cannot prove an optimum within seconds."""
    problem = make_problem(seed, num_samples=128, num_microbatches=64, spread=0.25)
    start = lpt_buckets(problem)
    assert bucket_loads(problem, start).max() > goal_s(problem)
    return problem, start
