"""Whatever a program's workers issue comes to an end under NCCL's rules, however few queues their streams share."""

import dataclasses
import random

import pytest
from drawn_plans import orders, plans
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.step import Instruction, Op, make_program, streams
from dflop.step.check import FEWEST_SMS
from dflop.step.routes import channels_of, make_routes
from dflop.step.streams import unfinished

QUEUES = [None, 32, 8, 2, 1]
SCHEDULES = [("1f1b", 1), ("interleaved_1f1b", 2), ("gpipe", 1)]


def drawn_messages(program, seed: int, share: float):
    """Some microbatches have nothing for some bridges: they are text alone, or their samples lie elsewhere."""
    rng, drawn = random.Random(seed), {}

    def has_message(edge: int, microbatch: int) -> bool:
        if not program.edges[edge].is_bridge:
            return True
        return drawn.setdefault((edge, microbatch), rng.random() < share)

    return has_message


def assert_ends(order, num_queues, num_sms, seed, share, is_tied):
    """`num_queues` or `num_sms` are few; of bridges' messages this `share` has anything to send."""
    plan, frozen, slots = order
    program = make_program(plan, TrainedSet(frozen), slots)
    has_message = drawn_messages(program, seed, share)
    assert unfinished(program, num_queues, has_message, is_tied=is_tied, num_sms=num_sms) == {}


ANY_CASE = {
    "num_queues": st.sampled_from(QUEUES),
    "num_sms": st.sampled_from([None, FEWEST_SMS]),
    "seed": st.integers(0, 99),
    "share": st.sampled_from([0.0, 0.3, 1.0]),
    "is_tied": st.booleans(),
}


@settings(max_examples=120)
@given(order=orders(), **ANY_CASE)
def test_every_program_ends(order, num_queues, num_sms, seed, share, is_tied):
    assert_ends(order, num_queues, num_sms, seed, share, is_tied)


@pytest.mark.exhaustive
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(order=orders(most_ranks=1024), **ANY_CASE)
def test_every_program_of_up_to_1024_ranks_ends(order, num_queues, num_sms, seed, share, is_tied):
    assert_ends(order, num_queues, num_sms, seed, share, is_tied)


def test_a_program_of_1024_ranks_ends():
    grids = (Grid(module="vision", num_ranks=1024, tp=8), Grid(module="llm", num_ranks=1024, tp=8, pp=4))
    order = Plan(placement="colocated", grids=grids, num_microbatches=4), ("vision",), None
    for num_queues, num_sms in ((1, None), (None, FEWEST_SMS)):
        assert_ends(order, num_queues, num_sms, 0, 0.3, True)


def test_messages_of_many_thread_blocks_leave_none_for_computing(monkeypatch):
    """So the model would find it, were the thread blocks of a message not few."""
    program = make_program(large_plan("colocated", 16, 4, "1f1b", 1))
    assert unfinished(program, num_sms=FEWEST_SMS) == {}
    monkeypatch.setattr(streams, "MESSAGE_CTAS", 40)
    assert unfinished(program) == {}
    assert len(unfinished(program, num_sms=FEWEST_SMS)) == 16


@settings(max_examples=100)
@given(plan=plans())
def test_there_are_at_most_eight_channels_whose_messages_leave_most_sms_free(plan):
    program = make_program(plan)
    assert len(channels_of(program.edges, make_routes(program.workers, program.edges))) <= 8


def large_plan(placement: str, world_size: int, pp: int, schedule: str, num_chunks: int) -> Plan:
    """Encoders on a quarter of the ranks, or on all of them."""
    shares = placement != "disjoint"
    num_encoding = {"disjoint": world_size // 4, "monolithic": world_size // pp}.get(placement, world_size)
    llm = Grid(
        module="llm",
        num_ranks=world_size - (0 if shares else num_encoding),
        pp=pp,
        rank_offset=0 if shares else num_encoding,
    )
    return Plan(
        placement=placement,
        grids=(Grid(module="vision", num_ranks=num_encoding), llm),
        num_microbatches=2 * pp,
        schedule=schedule,
        num_chunks=num_chunks,
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule[0])
@pytest.mark.parametrize("placement", ["disjoint", "colocated", "bubble_filled", "monolithic"])
@pytest.mark.parametrize("world_size", [8, 16, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_a_plan_of_several_nodes_ends(placement, world_size, schedule):
    program = make_program(large_plan(placement, world_size, 2, *schedule))
    assert unfinished(program, 1) == {}
    assert unfinished(program, 32, drawn_messages(program, 0, 0.3)) == {}


def in_orders(*orders: tuple[str, ...]):
    """A program of two ranks with a replica of each module, which compute the last backwards of modules in these
    orders."""
    grids = (Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=2))
    program = make_program(Plan(placement="colocated", grids=grids, num_microbatches=1))
    lists = [
        tuple(
            Instruction(Op.BACKWARD, number, 0, place=place)
            for place, module in enumerate(order)
            for number in worker.nodes
            if program.nodes[number].module == module
        )
        for worker, order in zip(program.workers, orders, strict=True)
    ]
    return dataclasses.replace(program, instructions=tuple(lists))


def test_gradients_that_begin_to_be_summed_in_other_orders_wait_in_a_circle():
    alike = in_orders(("llm", "vision"), ("llm", "vision"))
    crossed = in_orders(("llm", "vision"), ("vision", "llm"))
    assert unfinished(alike, 1) == unfinished(crossed, None) == {}
    assert sorted(unfinished(crossed, 1)) == [0, 1]


def received_late(program):
    """The program with each receive at the computation that waits for it."""
    lists = []
    for items in program.instructions:
        begun = {(item.op.is_forward, item.edge, item.microbatch): item for item in items if item.op.is_receive}
        late = []
        for item in items:
            if item.op.is_wait:
                receive = begun[item.op.is_forward, item.edge, item.microbatch]
                late.append(dataclasses.replace(receive, place=item.place))
            if not item.op.is_receive:
                late.append(item)
        lists.append(tuple(late))
    return dataclasses.replace(program, instructions=tuple(lists))


@pytest.mark.parametrize("world_size", [8, 16])
def test_receives_that_begin_only_when_they_are_needed_wait_in_a_circle(world_size):
    """So the model would find it, were messages not issued in the total order."""
    program = received_late(make_program(large_plan("colocated", world_size, 2, "1f1b", 1)))
    stuck = unfinished(program, 1)
    assert sorted(stuck) == list(range(world_size))
    waiting = {(item.edge, item.microbatch) for item in stuck.values() if item.edge >= 0}
    assert waiting, "no rank waits at a message"
    assert unfinished(make_program(large_plan("colocated", world_size, 2, "1f1b", 1)), 1) == {}
