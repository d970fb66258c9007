"""Where a step's seconds went: nothing is counted twice, the parts add up, and a sentence names what bounds the run."""

import time

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.config import load_config
from dflop.plan import Grid, Plan
from dflop.step import Op, Span, make_program
from dflop.step.run import Waits
from dflop.train.bottleneck import time_split
from dflop.train.observations import Merged
from dflop.train.rank_clock import KNOWN_PARTS, RankClock
from dflop.train.step_seconds import PARTS, StepSeconds, seconds_frame, split_line

PLAN = Plan(
    placement="disjoint",
    grids=(Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=2, rank_offset=1)),
    num_microbatches=2,
)
KINDS = ("F", "SYNC", "data", "peers", "else")


def in_turns(lengths):
    """What a rank does, one after the other, each for so long: what that is of each kind, and how long all took."""
    spans, waits, sums, now = [], Waits(data=[], peers=[]), dict.fromkeys(KINDS, 0.0), 0.0
    for what, seconds in lengths:
        if what in ("F", "SYNC"):
            spans.append(Span(Op(what), 0, 0, now, now + seconds))
        elif what in ("data", "peers"):
            getattr(waits, what).append((now, now + seconds))
        sums[what] += seconds
        now += seconds
    return spans, waits, sums, now


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.001, 1.0)), max_size=12))
def test_what_a_rank_did_is_told_apart(lengths):
    spans, waits, sums, end_s = in_turns(lengths)
    clock = RankClock()
    clock.add_pipeline(spans, waits, 0.0, end_s)
    row = dict(zip(KNOWN_PARTS, clock.row(), strict=True))
    assert row["computing"] == pytest.approx(sums["F"])
    assert row["sync"] == pytest.approx(sums["SYNC"])
    assert row["data"] == pytest.approx(sums["data"])
    assert row["peers"] == pytest.approx(sums["peers"])


def test_where_the_host_runs_ahead_of_a_gpu_only_gaps_between_computations_are_waits():
    spans = [Span(Op.FORWARD, 0, 0, 1.0, 2.0), Span(Op.FORWARD, 0, 1, 3.0, 4.0)]
    clock = RankClock()
    # The host waited for data while the device computed, and half a second longer.
    clock.add_pipeline(spans, Waits(data=[(1.2, 2.5)], peers=None), 1.0, 4.5)
    row = dict(zip(KNOWN_PARTS, clock.row(), strict=True))
    assert (row["computing"], row["data"], row["peers"]) == pytest.approx((2.0, 0.5, 1.0))


def test_what_is_no_part_of_its_own_is_other_and_a_step_begins_where_the_last_ended():
    begun = time.monotonic()
    clock = RankClock()
    with clock.part("optimiser"):
        pass
    row = clock.row()
    assert sum(row) <= time.monotonic() - begun
    assert clock.end() >= sum(row)
    assert clock.row()[KNOWN_PARTS.index("optimiser")] == 0


@given(st.lists(st.lists(st.floats(0, 1), min_size=7, max_size=7), min_size=3, max_size=3), st.floats(0, 2))
def test_the_parts_of_every_rank_add_up_to_the_step(known, longer_s):
    known = np.array(known)
    step_s = known.sum(axis=1).max() + longer_s
    idle = np.array([0.5, 0.1, 0.2])
    parts = StepSeconds(make_program(PLAN), 3).of_step(known, step_s, idle)
    assert parts.sum(axis=1) == pytest.approx(step_s)
    assert (parts >= 0).all()
    assert (parts[:, PARTS.index("bubble")] <= idle * known[:, 0].sum() / 2.2 + 1e-9).all()
    # Ranks 1 and 2 are replicas: what one syncs longer than the other is a wait for it.
    assert parts[1, PARTS.index("sync")] == parts[2, PARTS.index("sync")] == known[1:, 4].min()


def test_a_rank_whose_step_began_before_the_first_ranks_has_as_many_seconds_as_the_step():
    known = np.array(
        [[0.6, 0.1, 0.1, 0.0, 0.1, 0.1, 0.0], [0.7, 0.1, 0.2, 0.0, 0.1, 0.1, 0.0], [1.0, 0, 0, 0, 0, 0, 0]]
    )
    parts = StepSeconds(make_program(PLAN), 3).of_step(known, 1.0, np.array([0.2, 0.2, 0.2]))
    assert parts.sum(axis=1) == pytest.approx(1.0)
    assert parts[:, PARTS.index("computing")] == pytest.approx([0.6, 0.7, 1.0])
    assert parts[1, PARTS.index("optimiser")] == pytest.approx(0.1 * 0.3 / 0.5)


def test_the_line_of_a_step_tells_the_mean_rank_and_the_one_that_waits_least():
    parts = np.zeros((2, len(PARTS)))
    parts[:, PARTS.index("computing")] = 0.2, 0.6
    parts[:, PARTS.index("peers")] = 0.4, 0.0
    line = split_line(parts)
    assert line["mean_rank"]["computing_s"] == pytest.approx(0.4)
    assert (line["slowest_rank"]["rank"], line["slowest_rank"]["computing_s"]) == (1, 0.6)


def observed(ratios=(1.0, 1.0)):
    rows = [
        {"rank": rank, "module": module, "pp_stage": 0, "seconds": ratio, "predicted_s": 1.0, "warmup": False}
        for rank, (module, ratio) in enumerate(zip(("vision", "llm"), ratios, strict=True))
    ]
    return pl.DataFrame(rows)


def split_of(observations, **shares):
    """What is said of a step of a second in which two ranks have these parts, and otherwise compute."""
    parts = np.zeros((2, len(PARTS)))
    for name, of_ranks in shares.items():
        parts[:, PARTS.index(name)] = of_ranks
    parts[:, PARTS.index("computing")] = 1 - parts.sum(axis=1)
    return time_split(load_config(), Merged(observations, seconds_frame(5, parts, 1.0, warmup=False)))


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"data": (0.31, 0.02), "peers": (0.0, 0.29)}, "loaders bound this run: rank 0 (vision stage 0) waited 31% of"),
        ({"schedule": (0.2, 0.21)}, "scheduler bounds this run: rank 1 (llm stage 0) waited 21% of"),
        ({"bubble": (0.3, 0.2)}, "pipeline bounds this run: its own schedule leaves ranks without work for 25% of"),
        ({"sync": (0.1, 0.1)}, "Gradient sync bounds this run: it takes 10%"),
        ({"optimiser": (0.1, 0.1)}, "The optimiser bounds this run: it takes 10%"),
        ({"other": (0.2, 0.1)}, "15% of each step goes into other work"),
        ({"peers": (0.3, 0.0)}, "Rank 1 (llm stage 0) bounds this run: it computes 43% more than the others"),
        ({"peers": (0.2, 0.2)}, "Ranks wait for each other in turns for 20%"),
        ({"data": (0.02, 0.01)}, "Computing bounds this run: ranks compute 98%"),
    ],
)
def test_one_sentence_says_what_bounds_the_run(shares, said):
    split = split_of(observed(), **shares)
    assert said in split["bound_by"]
    assert "\n" not in split["bound_by"]
    assert sum(split["share"].values()) == pytest.approx(1)


def test_a_rank_that_its_costs_did_not_foresee_is_named_with_both_ratios():
    said = split_of(observed((1.0, 1.4)), peers=(0.3, 0.0))["bound_by"]
    assert "Rank 1 (llm stage 0) bounds this run: it takes 1.40x its predicted time, the others 1.00x" in said
    assert "`dflop profile-costs`" in said


def test_of_steps_that_warm_up_nothing_is_said():
    frame = seconds_frame(0, np.ones((2, len(PARTS))), 8.0, warmup=True)
    assert time_split(load_config(), Merged(observed(), frame)) is None
