"""The trace shows every computation of the last steps once, and no rank doing two things at a time."""

from itertools import pairwise

import polars as pl
import pytest

from dflop.store import STEP_SECONDS_SCHEMA
from dflop.train.trace import chrome_trace

NUM_RANKS, NUM_STEPS, NUM_MICROBATCHES = 3, 7, 4
NO_SECONDS = STEP_SECONDS_SCHEMA.to_frame()


@pytest.fixture
def observations():
    """Three ranks of two modules, back to back and a sync at the end; later steps are slower."""
    rows = []
    for step in range(NUM_STEPS):
        for rank in range(NUM_RANKS):
            clock_s = 0.01 * rank
            passes = [(name, index) for index in range(NUM_MICROBATCHES) for name in ("forward", "backward")]
            for name, microbatch in [*passes, ("sync", -1)]:
                seconds = 0.001 * (1 + step + microbatch % 2)
                rows.append(
                    {
                        "step": step,
                        "rank": rank,
                        "module": "vision" if rank == 0 else "llm",
                        "pp_stage": max(0, rank - 1),
                        "dp_rank": 0,
                        "microbatch": microbatch,
                        "pass": name,
                        "start_s": clock_s,
                        "seconds": seconds,
                        "predicted_s": None if name == "sync" else seconds,
                    }
                )
                clock_s += seconds
    return pl.DataFrame(rows, infer_schema_length=None)


def computations(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_every_computation_of_the_last_steps_is_there_once(observations):
    events = computations(chrome_trace(observations, NO_SECONDS, num_steps=2))
    seen = sorted((event["args"]["step"], event["tid"], event["name"]) for event in events)
    labels = [f"{name} {index}" for index in range(NUM_MICROBATCHES) for name in ("forward", "backward")]
    expected = [(step, rank, label) for step in (5, 6) for rank in range(NUM_RANKS) for label in [*labels, "sync"]]
    assert seen == sorted(expected)


def test_a_rank_never_does_two_things_at_a_time_not_even_across_steps(observations):
    events = computations(chrome_trace(observations, NO_SECONDS))
    for rank in range(NUM_RANKS):
        own = sorted((event for event in events if event["tid"] == rank), key=lambda event: event["ts"])
        for before, after in pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_a_run_shorter_than_the_asked_steps_is_shown_whole(observations):
    events = computations(chrome_trace(observations.filter(pl.col("step") < 2), NO_SECONDS))
    assert {event["args"]["step"] for event in events} == {0, 1}


def test_every_rank_is_named_by_its_part_of_the_plan(observations):
    named = {
        event["tid"]: event["args"]["name"]
        for event in chrome_trace(observations, NO_SECONDS)["traceEvents"]
        if event["ph"] == "M"
    }
    assert named == {0: "vision stage 0 replica 0", 1: "llm stage 0 replica 0", 2: "llm stage 1 replica 0"}


def test_a_rank_that_carries_several_parts_is_named_by_all_of_them(observations):
    both = pl.concat(
        [observations, observations.with_columns(module=pl.lit("vision"), pp_stage=pl.lit(0, dtype=pl.Int64))]
    )
    named = [event for event in chrome_trace(both, NO_SECONDS)["traceEvents"] if event["ph"] == "M"]
    assert {event["tid"]: event["args"]["name"] for event in named}[2] == (
        "llm stage 1 replica 0 + vision stage 0 replica 0"
    )
    assert len(named) == NUM_RANKS


def test_a_counter_of_each_rank_says_where_the_seconds_of_its_steps_went(observations):
    parts = {name: 0.1 for name, kind in STEP_SECONDS_SCHEMA.items() if kind == pl.Float64}
    rows = [{"step": step, "rank": rank, "warmup": False} | parts for step in range(NUM_STEPS) for rank in range(2)]
    trace = chrome_trace(observations, pl.DataFrame(rows, schema=STEP_SECONDS_SCHEMA), num_steps=2)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert len(counters) == 4
    assert counters[0]["args"]["computing"] == pytest.approx(100)
    assert "step" not in counters[0]["args"]
