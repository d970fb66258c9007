"""The simulator's times are those of a textbook pipeline, and of a slow walk along the dependency graph.

The oracle takes the program's lists literally: a computation starts when the worker's last one has ended and every
message it receives has arrived; its start is the longest path to it.
"""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.pipeline import (
    Grid,
    Instruction,
    Op,
    Plan,
    Program,
    StageTimes,
    compile_program,
    make_program,
    simulate,
    simulate_step_s,
)


def make_plan(vision_dp=1, llm_pp=1, llm_dp=1, num_microbatches=1) -> Plan:
    return Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=vision_dp),
            Grid(module="llm", num_ranks=llm_pp * llm_dp, pp=llm_pp, rank_offset=vision_dp),
        ),
        num_microbatches=num_microbatches,
    )


def longest_path(program: Program, times: StageTimes) -> tuple[np.ndarray, np.ndarray, float]:
    """Starts and ends [2, num_workers, num_microbatches] and the step time, by recursion over what must come before."""
    computed = [[item for item in items if item.op in (Op.FORWARD, Op.BACKWARD)] for items in program.instructions]

    @cache
    def end_of(worker: int, item: Instruction) -> float:
        seconds = times.forward_s if item.op is Op.FORWARD else times.backward_s
        return start_of(worker, item) + seconds[worker, item.microbatch]

    @cache
    def start_of(worker: int, item: Instruction) -> float:
        place = computed[worker].index(item)
        ready = [end_of(worker, computed[worker][place - 1]) if place else 0.0]
        receive = Op.RECV_FORWARD if item.op is Op.FORWARD else Op.RECV_BACKWARD
        for other in program.instructions[worker]:
            if other.op is receive and other.microbatch == item.microbatch:
                edge = program.edges[other.edge]
                delay = times.transfer_s[other.edge, item.microbatch]
                if not np.isnan(delay):
                    peer = edge.source if item.op is Op.FORWARD else edge.target
                    ready.append(end_of(peer, Instruction(item.op, item.microbatch)) + delay)
        return max(ready)

    shape = (2, len(program.workers), program.num_microbatches)
    start_s, end_s = np.full(shape, np.nan), np.full(shape, np.nan)
    for worker, items in enumerate(computed):
        for item in items:
            cell = (0 if item.op is Op.FORWARD else 1, worker, item.microbatch)
            start_s[cell], end_s[cell] = start_of(worker, item), end_of(worker, item)
    return start_s, end_s, float((np.nanmax(end_s, axis=(0, 2)) + times.sync_s).max())


def make_times(program: Program, forward_s=1.0, backward_s=2.0, transfer_s=0.0, sync_s=0.0) -> StageTimes:
    shape = (len(program.workers), program.num_microbatches)
    return StageTimes(
        forward_s=np.broadcast_to(np.asarray(forward_s, dtype=float), shape).copy(),
        backward_s=np.broadcast_to(np.asarray(backward_s, dtype=float), shape).copy(),
        transfer_s=np.full((len(program.edges), program.num_microbatches), float(transfer_s)),
        sync_s=np.full(len(program.workers), float(sync_s)),
    )


@st.composite
def cases(draw):
    plan = make_plan(draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6)))
    program = make_program(plan, draw(st.sampled_from([(), ("vision",), ("llm",)])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (len(program.workers), plan.num_microbatches)
    transfer_s = rng.exponential(0.5, (len(program.edges), plan.num_microbatches))
    is_bridge = np.array([edge.is_bridge for edge in program.edges])
    empty = is_bridge[:, None] & (rng.random(transfer_s.shape) < draw(st.sampled_from([0.0, 0.3, 1.0])))
    times = StageTimes(
        forward_s=rng.exponential(1.0, shape) * (rng.random(shape) > 0.2),
        backward_s=rng.exponential(2.0, shape) * (rng.random(shape) > 0.2),
        transfer_s=np.where(empty, np.nan, transfer_s),
        sync_s=rng.exponential(0.5, len(program.workers)),
    )
    return program, times


@settings(deadline=None, max_examples=150)
@given(cases())
def test_starts_ends_and_the_step_are_the_longest_paths(case):
    program, times = case
    compiled = compile_program(program)
    timeline = simulate(compiled, times)
    start_s, end_s, step_s = longest_path(program, times)
    np.testing.assert_allclose(timeline.start_s, start_s)
    np.testing.assert_allclose(timeline.end_s, end_s)
    assert timeline.step_s == pytest.approx(step_s)
    assert simulate_step_s(compiled, times) == timeline.step_s


@settings(deadline=None, max_examples=60)
@given(cases())
def test_idle_is_what_is_left_of_a_step_after_the_work(case):
    program, times = case
    timeline = simulate(compile_program(program), times)
    has_backward = ~np.isnan(timeline.end_s[1])
    work_s = times.forward_s.sum(axis=1) + (times.backward_s * has_backward).sum(axis=1) + times.sync_s
    if timeline.step_s > 0:
        np.testing.assert_allclose(timeline.idle_of_worker, 1 - work_s / timeline.step_s, atol=1e-12)
        assert timeline.idle == pytest.approx(1 - work_s.sum() / (len(work_s) * timeline.step_s))
    assert timeline.step_s >= work_s.max() * (1 - 1e-12)


@given(pp=st.integers(1, 5), num_microbatches=st.integers(1, 12), forward_s=st.floats(0.1, 3), ratio=st.floats(0.5, 3))
@settings(deadline=None)
def test_equal_stages_take_the_textbook_time_of_1f1b(pp, num_microbatches, forward_s, ratio):
    """(m + p - 1)(f + b) for p stages, the encoder being one of them (PipeDream-Flush)."""
    program = make_program(make_plan(llm_pp=pp, num_microbatches=num_microbatches))
    backward_s = ratio * forward_s
    timeline = simulate(compile_program(program), make_times(program, forward_s, backward_s))
    depth = pp + 1
    assert timeline.step_s == pytest.approx((num_microbatches + depth - 1) * (forward_s + backward_s))
    assert timeline.idle == pytest.approx((depth - 1) / (num_microbatches + depth - 1))


def test_equal_transfers_delay_the_fill_and_the_drain():
    """With one microbatch the step is the way there and back: every stage twice and every edge twice."""
    program = make_program(make_plan(llm_pp=3))
    timeline = simulate(compile_program(program), make_times(program, 1.0, 2.0, transfer_s=0.25))
    assert timeline.step_s == pytest.approx(4 * (1 + 2) + 2 * 3 * 0.25)


def test_nobody_waits_for_an_edge_that_carries_nothing():
    """The LLM starts at once on a microbatch of text alone, while the encoder is still busy with pictures."""
    program = make_program(make_plan(num_microbatches=2))
    times = make_times(program, forward_s=[[10.0, 10.0], [1.0, 1.0]], backward_s=[[0.0, 0.0], [1.0, 1.0]])
    waiting = simulate(compile_program(program), times)
    assert waiting.start_s[0, 1].tolist() == [10.0, 20.0]
    times.transfer_s[0, 0] = np.nan
    free = simulate(compile_program(program), times)
    assert free.start_s[0, 1].tolist() == [0.0, 20.0]


def test_an_llm_replica_waits_only_for_the_encoders_that_send_to_it():
    program = make_program(make_plan(vision_dp=2, llm_dp=2))
    times = make_times(program, forward_s=[[1.0], [5.0], [1.0], [1.0]])
    encoder, replica = program.edges[1].source, program.edges[1].target
    assert (program.workers[encoder].dp_rank, program.workers[replica].dp_rank) == (0, 1)
    times.transfer_s[[1, 2], 0] = np.nan  # each encoder feeds its own replica alone
    assert simulate(compile_program(program), times).start_s[0, 2:, 0].tolist() == [1.0, 5.0]


def test_a_frozen_encoder_is_done_after_its_forwards():
    program = make_program(make_plan(llm_pp=2, num_microbatches=3), frozen=("vision",))
    timeline = simulate(compile_program(program), make_times(program))
    assert np.isnan(timeline.end_s[1, 0]).all()
    assert timeline.end_s[0, 0].tolist() == [1.0, 2.0, 3.0]


def test_the_gradient_sync_of_the_last_to_finish_ends_the_step():
    program = make_program(make_plan())
    times = make_times(program)
    times.sync_s[:] = [0.5, 7.0]
    timeline = simulate(compile_program(program), times)
    assert timeline.step_s == timeline.end_s[1, 1, 0] + 7.0


def test_a_step_without_any_work_takes_no_time_and_is_not_idle():
    program = make_program(make_plan(llm_pp=2))
    timeline = simulate(compile_program(program), make_times(program, 0.0, 0.0))
    assert (timeline.step_s, timeline.idle) == (0.0, 0.0)


def test_lists_that_wait_for_each_other_are_noticed():
    program = make_program(make_plan())
    forward, backward = Instruction(Op.FORWARD, 0), Instruction(Op.BACKWARD, 0)
    receive = Instruction(Op.RECV_BACKWARD, 0, 0)
    circular = Program(
        workers=program.workers,
        edges=program.edges,
        num_microbatches=1,
        instructions=((receive, backward, forward), program.instructions[1]),
    )
    with pytest.raises(AssertionError, match="wait for each other in a circle"):
        simulate(compile_program(circular), make_times(circular))
