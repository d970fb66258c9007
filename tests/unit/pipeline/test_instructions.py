"""The instruction list does every microbatch once, its transfers match at both ends, and it never deadlocks.

The oracle is a slow, obvious interpreter: every worker carries out its list, a send never waits, a receive waits for
the message, and messages between two workers arrive in the order they were sent (as NCCL has it, without tags).
"""

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.pipeline import Edge, Grid, Instruction, Op, Plan, Program, Worker, make_program

RECEIVES = (Op.RECV_FORWARD, Op.RECV_BACKWARD)
SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)
frozen_sets = st.sampled_from([(), ("vision",), ("llm",), ("vision", "llm")])


def make_plan(vision_dp=1, llm_pp=1, llm_dp=1, num_microbatches=1) -> Plan:
    return Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=vision_dp),
            Grid(module="llm", num_ranks=llm_pp * llm_dp, pp=llm_pp, rank_offset=vision_dp),
        ),
        num_microbatches=num_microbatches,
    )


plans = st.builds(
    make_plan,
    vision_dp=st.integers(1, 3),
    llm_pp=st.integers(1, 4),
    llm_dp=st.integers(1, 3),
    num_microbatches=st.integers(1, 6),
)


def computed(items: tuple[Instruction, ...], op: Op) -> list[int]:
    return [item.microbatch for item in items if item.op is op]


def route(program: Program, item: Instruction) -> tuple[int, int, str]:
    """(sending worker, receiving worker, direction) of a transfer."""
    edge = program.edges[item.edge]
    if item.op in (Op.SEND_FORWARD, Op.RECV_FORWARD):
        return edge.source, edge.target, "forward"
    return edge.target, edge.source, "backward"


def interpret(program: Program, carries=lambda edge, microbatch: True) -> list[tuple[int, Instruction]]:
    """Carry out all lists with blocking receives; returns what was done, in order. Fails on deadlock and mismatch."""
    mail: dict[tuple[int, int, str], deque] = defaultdict(deque)
    done, history = [0] * len(program.workers), []
    moved = True
    while moved:
        moved = False
        for worker, items in enumerate(program.instructions):
            while done[worker] < len(items):
                item = items[done[worker]]
                if item.edge >= 0 and carries(item.edge, item.microbatch):
                    box = mail[route(program, item)]
                    if item.op in SENDS:
                        assert route(program, item)[0] == worker
                        box.append(item.microbatch)
                    else:
                        assert route(program, item)[1] == worker
                        if not box:
                            break
                        assert box.popleft() == item.microbatch, "messages arrive in another order"
                done[worker] += 1
                moved = True
                history.append((worker, item))
    assert done == [len(items) for items in program.instructions], "deadlock"
    assert not any(mail.values()), "a message that nobody receives"
    return history


@given(plan=plans, frozen=frozen_sets)
def test_every_worker_does_every_microbatch_once_in_each_direction(plan, frozen):
    program = make_program(plan, frozen)
    everything = list(range(plan.num_microbatches))
    for worker, items in zip(program.workers, program.instructions, strict=True):
        assert computed(items, Op.FORWARD) == everything
        has_backward = worker.module == "llm" or worker.module not in frozen
        assert computed(items, Op.BACKWARD) == (everything if has_backward else [])
        assert [item for item in items if item.op is Op.SYNC_GRADIENTS] == [items[-1]]


@given(plan=plans, frozen=frozen_sets)
def test_both_ends_of_an_edge_speak_of_the_same_microbatches_in_the_same_order(plan, frozen):
    program = make_program(plan, frozen)
    for number, edge in enumerate(program.edges):
        for sender, receiver, send, receive in (
            (edge.source, edge.target, Op.SEND_FORWARD, Op.RECV_FORWARD),
            (edge.target, edge.source, Op.SEND_BACKWARD, Op.RECV_BACKWARD),
        ):
            sent, received = (
                [item.microbatch for item in program.instructions[worker] if item.op is op and item.edge == number]
                for worker, op in ((sender, send), (receiver, receive))
            )
            assert sent == received
            if send is Op.SEND_FORWARD:
                assert sent == list(range(plan.num_microbatches))


@given(plan=plans)
def test_edges_join_each_encoder_to_each_llm_replica_and_stages_within_a_replica(plan):
    program = make_program(plan)
    llm = plan.grid("llm")
    bridges = {(program.workers[e.source], program.workers[e.target]) for e in program.edges if e.is_bridge}
    assert bridges == {
        (Worker("vision", 0, a), Worker("llm", 0, b)) for a in range(plan.grid("vision").dp) for b in range(llm.dp)
    }
    inside = [(program.workers[e.source], program.workers[e.target]) for e in program.edges if not e.is_bridge]
    assert sorted(inside, key=str) == sorted(
        ((Worker("llm", s, r), Worker("llm", s + 1, r)) for s in range(llm.pp - 1) for r in range(llm.dp)), key=str
    )
    assert len({(edge.source, edge.target) for edge in program.edges}) == len(program.edges)


@given(plan=plans, frozen=frozen_sets)
def test_what_is_computed_has_all_its_inputs_and_is_sent_on(plan, frozen):
    """Within a list: receives stand before the computation that needs them, sends behind the one that makes them."""
    program = make_program(plan, frozen)
    for items in program.instructions:
        place = {(item.op, item.microbatch): index for index, item in enumerate(items) if item.edge < 0}
        for index, item in enumerate(items):
            needed_by = {Op.RECV_FORWARD: Op.FORWARD, Op.RECV_BACKWARD: Op.BACKWARD}.get(item.op)
            made_by = {Op.SEND_FORWARD: Op.FORWARD, Op.SEND_BACKWARD: Op.BACKWARD}.get(item.op)
            if needed_by:
                assert index < place[needed_by, item.microbatch]
            if made_by:
                assert index > place[made_by, item.microbatch]
            if item.op is Op.BACKWARD:
                assert index > place[Op.FORWARD, item.microbatch]


@settings(deadline=None)
@given(plan=plans, frozen=frozen_sets)
def test_the_program_never_deadlocks(plan, frozen):
    interpret(make_program(plan, frozen))


@settings(deadline=None)
@given(plan=plans, frozen=frozen_sets, data=st.data())
def test_the_program_never_deadlocks_where_bridges_carry_nothing(plan, frozen, data):
    program = make_program(plan, frozen)
    empty = {
        (edge, microbatch)
        for edge in range(len(program.edges))
        for microbatch in range(plan.num_microbatches)
        if program.edges[edge].is_bridge and data.draw(st.booleans())
    }
    interpret(program, lambda edge, microbatch: (edge, microbatch) not in empty)


@given(plan=plans, frozen=frozen_sets)
def test_as_many_microbatches_are_in_flight_as_there_are_stages_ahead(plan, frozen):
    """Memory follows: the encoder stands before `pp` stages, stage s of the LLM before `pp - s - 1`."""
    program = make_program(plan, frozen)
    pp = plan.grid("llm").pp
    for worker, items in zip(program.workers, program.instructions, strict=True):
        if worker.module != "llm" and worker.module in frozen:
            continue
        allowed = min(plan.num_microbatches, pp - worker.pp_stage if worker.module == "llm" else pp + 1)
        in_flight = peak = 0
        for item in items:
            in_flight += (item.op is Op.FORWARD) - (item.op is Op.BACKWARD)
            peak = max(peak, in_flight)
        assert peak == allowed
        assert in_flight == 0


@given(plan=plans)
def test_in_the_steady_state_forwards_and_backwards_alternate(plan):
    program = make_program(plan)
    pp = plan.grid("llm").pp
    for worker, items in zip(program.workers, program.instructions, strict=True):
        ahead = min(pp - worker.pp_stage - 1 if worker.module == "llm" else pp, plan.num_microbatches)
        order = "".join(item.op for item in items if item.op in (Op.FORWARD, Op.BACKWARD))
        steady = plan.num_microbatches - ahead
        assert order == "F" * ahead + "FB" * steady + "B" * ahead


@given(plan=plans, frozen=st.sampled_from([("vision",), ("vision", "llm")]))
def test_a_frozen_encoder_has_no_backward_and_no_gradient_comes_over_its_bridge(plan, frozen):
    program = make_program(plan, frozen)
    for worker, items in zip(program.workers, program.instructions, strict=True):
        for item in items:
            if item.op in (Op.SEND_BACKWARD, Op.RECV_BACKWARD):
                assert not program.edges[item.edge].is_bridge
            assert not (worker.module == "vision" and item.op is Op.BACKWARD)


@given(plan=plans)
def test_a_frozen_llm_still_passes_gradients_on_to_the_encoder(plan):
    assert make_program(plan, ("llm",)) == make_program(plan)


def test_a_small_program_reads_as_expected():
    program = make_program(make_plan(llm_pp=2, num_microbatches=2))
    assert program.edges == (Edge(0, 1, True), Edge(1, 2, False))
    assert [" ".join(map(str, items)) for items in program.instructions] == [
        "0F 0SEND_F@0 1F 1SEND_F@0 0RECV_B@0 0B 1RECV_B@0 1B SYNC",
        "0RECV_F@0 0F 0SEND_F@1 1RECV_F@0 1F 1SEND_F@1 0RECV_B@1 0B 0SEND_B@0 1RECV_B@1 1B 1SEND_B@0 SYNC",
        "0RECV_F@1 0F 0B 0SEND_B@1 1RECV_F@1 1F 1B 1SEND_B@1 SYNC",
    ]


def test_a_list_that_sends_in_another_order_would_be_caught():
    """The interpreter itself can fail: swap two sends, or drop one."""
    program = make_program(make_plan(num_microbatches=2))
    encoder = list(program.instructions[0])
    first, second = (index for index, item in enumerate(encoder) if item.op is Op.SEND_FORWARD)
    swapped = encoder.copy()
    swapped[first], swapped[second] = swapped[second], swapped[first]
    for broken, complaint in (
        (swapped, "another order"),
        ([*encoder[:first], *encoder[first + 1 :]], "order|deadlock"),
    ):
        with pytest.raises(AssertionError, match=complaint):
            interpret(
                Program(
                    workers=program.workers,
                    edges=program.edges,
                    num_microbatches=2,
                    instructions=(tuple(broken), *program.instructions[1:]),
                )
            )


def test_the_interpreter_keeps_each_workers_order():
    program = make_program(make_plan(vision_dp=2, llm_pp=3, llm_dp=2, num_microbatches=4))
    history = interpret(program)
    for worker, items in enumerate(program.instructions):
        assert tuple(item for who, item in history if who == worker) == items
    assert len(history) == sum(map(len, program.instructions))
