"""The instruction list of every plan passes the check, the check catches broken lists, and the orders are torch's.

torch's schedules serve as oracle where it has them: for an LLM without encoders.
"""

import dataclasses
from types import SimpleNamespace

import pytest
from drawn_plans import llm_alone, orders, plans
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import disjoint
from torch.distributed.pipelining import schedules as torch_schedules
from torch_notation import actions_of

from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.step import (
    Edge,
    Instruction,
    Op,
    Program,
    StepInstructions,
    check_program,
    make_program,
    most_in_flight,
    stages_of,
)
from dflop.step.compiled import AHEAD

properties = settings(max_examples=120)


@properties
@given(order=orders())
def test_every_program_does_everything_once_matches_its_transfers_and_never_deadlocks(order):
    plan, frozen, slots = order
    check_program(plan, make_program(plan, TrainedSet(frozen), slots), TrainedSet(frozen))


@properties
@given(order=orders())
def test_every_node_computes_every_microbatch_once_in_each_direction(order):
    """Counted apart from the check: forwards and backwards in the microbatches' order, one sync."""
    plan, frozen, slots = order
    program = make_program(plan, TrainedSet(frozen), slots)
    everything = list(range(plan.num_microbatches))
    for worker, items in zip(program.workers, program.instructions, strict=True):
        for node in worker.nodes:
            done = {op: [item.microbatch for item in items if item.node == node and item.op is op] for op in Op}
            module, is_last = program.nodes[node].module, program.nodes[node].is_last
            is_frozen = module in frozen or (f"{module}.encoder" in frozen and not is_last)
            assert done[Op.FORWARD] == everything
            assert done[Op.BACKWARD] == (everything if module == "llm" or not is_frozen else [])
            assert done[Op.SYNC_GRADIENTS] == [-1]


@properties
@given(plan=plans(), frozen=st.sampled_from([("vision",), ("vision", "audio")]))
def test_a_frozen_encoder_has_no_backward_and_no_gradient_comes_to_it(plan, frozen):
    program = make_program(plan, TrainedSet(frozen))
    for item in (item for items in program.instructions for item in items):
        if item.op in (Op.SEND_BACKWARD, Op.RECV_BACKWARD, Op.WAIT_BACKWARD):
            assert program.nodes[program.edges[item.edge].source].module not in frozen
        if item.op is Op.BACKWARD:
            assert program.nodes[item.node].module not in frozen


@given(order=orders(placements=["bubble_filled", "colocated"]))
def test_a_ranks_instructions_of_a_batch_are_those_of_the_program_with_its_slots(order):
    plan, frozen, slots = order
    program, of_batch = make_program(plan, TrainedSet(frozen)), make_program(plan, TrainedSet(frozen), slots)
    for worker, instructions in zip(of_batch.workers, of_batch.instructions, strict=True):
        for rank in range(worker.first_rank, worker.first_rank + worker.num_ranks):
            assert StepInstructions(plan, program, TrainedSet(frozen), rank).of(slots) == instructions


@given(plan=plans())
def test_a_frozen_llm_still_passes_gradients_on_to_the_encoder(plan):
    assert make_program(plan, TrainedSet(("llm",))) == make_program(plan)


@properties
@given(plan=plans())
def test_edges_join_each_encoder_to_each_llm_replica_and_stages_within_a_replica(plan):
    program = make_program(plan)
    nodes, llm = program.nodes, plan.grid("llm")
    bridges = [(nodes[edge.source], nodes[edge.target]) for edge in program.edges if edge.is_bridge]
    assert sorted(bridges, key=str) == sorted(
        (
            (source, target)
            for source in nodes
            for target in nodes
            if source.module != "llm"
            and source.pp_stage == plan.grid(source.module).pp - 1
            and (target.module, target.pp_stage) == ("llm", 0)
            and (plan.placement != "monolithic" or source.dp_rank == target.dp_rank)
        ),
        key=str,
    )
    inside = [(nodes[edge.source], nodes[edge.target]) for edge in program.edges if not edge.is_bridge]
    assert all((a.module, a.pp_stage + 1, a.dp_rank) == (b.module, b.pp_stage, b.dp_rank) for a, b in inside)
    assert len(inside) == sum((plan.num_stages(grid.module) - 1) * grid.dp for grid in plan.grids)
    assert llm.dp == sum(node.module == "llm" and node.pp_stage == 0 for node in nodes)


def passes(plan: Plan) -> list[str]:
    """The order of each group of workers as letters."""
    return ["".join(action.op for action in row) for row in actions_of(plan)]


@given(pp=st.integers(1, 6), num_microbatches=st.integers(1, 14))
def test_1f1b_runs_one_forward_ahead_for_every_stage_behind(pp, num_microbatches):
    plan = disjoint(llm_pp=pp, num_microbatches=num_microbatches)
    for place, order in enumerate(passes(plan)):
        ahead = min(pp - place, num_microbatches)
        assert order == "F" * ahead + "FB" * (num_microbatches - ahead) + "B" * ahead


def torch_order(schedule: type, pp: int, num_microbatches: int, num_chunks: int = 1) -> list[list[str]]:
    """Each rank's computations as torch's schedule has them, without its bubbles."""
    self = SimpleNamespace(
        _num_stages=pp,
        _n_microbatches=num_microbatches,
        n_local_stages=num_chunks,
        pp_group_size=pp,
        microbatches_per_round=pp if num_microbatches >= pp else num_microbatches,
    )
    if hasattr(schedule, "_calculate_single_rank_operations"):
        ranks = [schedule._calculate_single_rank_operations(self, rank) for rank in range(pp)]
    else:
        ranks = list(schedule._get_pipeline_order(self).values())
    return [[str(item) for item in rank if item is not None and "REDUCE" not in str(item)] for rank in ranks]


def own_order(plan: Plan) -> list[list[str]]:
    return [[str(action) for action in row] for row in actions_of(plan)]


@given(pp=st.integers(1, 6), num_microbatches=st.integers(1, 14))
def test_gpipe_is_torchs(pp, num_microbatches):
    expected = torch_order(torch_schedules.ScheduleGPipe, pp, num_microbatches)
    assert own_order(llm_alone(pp, num_microbatches, "gpipe")) == expected


@given(pp=st.integers(2, 6), more=st.integers(0, 8))
def test_1f1b_is_torchs(pp, more):
    """All ranks but the last, of which torch 2.13 numbers the forwards from 1."""
    expected = torch_order(torch_schedules.Schedule1F1B, pp, pp + more)
    own = own_order(llm_alone(pp, pp + more))
    assert own[:-1] == expected[:-1]
    assert [action[1] for action in own[-1]] == [action[1] for action in expected[-1]]


@given(pp=st.integers(2, 6), rounds=st.integers(1, 4), num_chunks=st.integers(2, 4))
def test_interleaved_1f1b_is_torchs(pp, rounds, num_chunks):
    expected = torch_order(torch_schedules.ScheduleInterleaved1F1B, pp, pp * rounds, num_chunks)
    assert own_order(llm_alone(pp, pp * rounds, "interleaved_1f1b", num_chunks)) == expected


@properties
@given(plan=plans(schedules=["1f1b", "gpipe"], placements=["disjoint", "monolithic"]))
def test_the_bound_of_microbatches_in_flight_is_reached(plan):
    """Memory follows from it; it would be of no use if it were merely never exceeded."""
    orders = actions_of(plan)
    for place, stage in enumerate(stages_of(plan)):
        held, most = 0, 0
        own = [action for action in orders[stage.group] if action.stage == place]
        for action in own:
            held += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
            most = max(most, held)
        assert most == most_in_flight(plan, stage)


def test_a_small_program_reads_as_expected():
    program = make_program(disjoint(llm_pp=2, num_microbatches=2))
    assert program.edges == (Edge(0, 1, track=0), Edge(1, 2, track=1))
    assert [" ".join(map(str, items)) for items in program.instructions] == [
        "0F0 0SEND_F0@0 0F1 0SEND_F1@0 0RECV_B0@0 0WAIT_B0@0 0B0 0RECV_B1@0 0WAIT_B1@0 0B1 0SYNC",
        "1RECV_F0@0 1RECV_F1@0 1WAIT_F0@0 1F0 1SEND_F0@1 1WAIT_F1@0 1F1 1SEND_F1@1 "
        "1RECV_B0@1 1WAIT_B0@1 1B0 1SEND_B0@0 1RECV_B1@1 1WAIT_B1@1 1B1 1SEND_B1@0 1SYNC",
        "2RECV_F0@1 2RECV_F1@1 2WAIT_F0@1 2F0 2B0 2SEND_B0@1 2WAIT_F1@1 2F1 2B1 2SEND_B1@1 2SYNC",
    ]


def test_a_monolithic_encoder_moves_nothing_over_its_bridge():
    grids = (Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=2, pp=2))
    program = make_program(Plan(placement="monolithic", grids=grids, num_microbatches=1))
    assert [" ".join(map(str, items)) for items in program.instructions] == [
        "0F0 1F0 1SEND_F0@1 1RECV_B0@1 1WAIT_B0@1 1B0 0B0 0SYNC 1SYNC",
        "2RECV_F0@1 2WAIT_F0@1 2F0 2B0 2SEND_B0@1 2SYNC",
    ]


def test_a_colocated_rank_first_encodes_then_does_its_part_of_the_pipeline_then_goes_back():
    grids = (Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=2, pp=2))
    plan = Plan(placement="colocated", grids=grids, num_microbatches=3)
    assert [" ".join(map(str, row)) for row in actions_of(plan)] == [
        "0F0 0F1 0F2 1F0 1F1 1B0 1F2 1B1 1B2 0B0 0B1 0B2",
        "0F0 0F1 0F2 2F0 2B0 2F1 2B1 2F2 2B2 0B0 0B1 0B2",
    ]


def broken(program: Program, worker: int, items: list[Instruction]) -> Program:
    lists = list(program.instructions)
    lists[worker] = tuple(items)
    return dataclasses.replace(program, instructions=tuple(lists))


@properties
@given(plan=plans(), data=st.data())
def test_a_list_that_lacks_an_instruction_or_has_one_twice_does_not_pass(plan, data):
    program = make_program(plan)
    worker = data.draw(st.integers(0, len(program.workers) - 1))
    items = list(program.instructions[worker])
    place = data.draw(st.integers(0, len(items) - 1))
    changed = (
        items[:place] + items[place + 1 :]
        if data.draw(st.booleans())
        else [*items[:place], items[place], *items[place:]]
    )
    with pytest.raises(ValueError, match=r"does .* times, not"):
        check_program(plan, broken(program, worker, changed))


def moved(items: tuple[Instruction, ...], which: Instruction, before: Instruction) -> list[Instruction]:
    """The list with one instruction before another one; both are given without their places."""
    plain = [dataclasses.replace(item, place=-1) for item in items]
    rest = [item for item, known in zip(items, plain, strict=True) if known != which]
    rest.insert([item for item in plain if item != which].index(before), items[plain.index(which)])
    return rest


def test_lists_that_differ_in_their_order_or_wait_in_a_circle_are_told_apart():
    plan = disjoint(num_microbatches=2)
    program = make_program(plan)
    encoder, llm = program.instructions
    late = moved(llm, Instruction(Op.RECV_FORWARD, 1, 1, 0), Instruction(Op.RECV_FORWARD, 1, 0, 0))
    with pytest.raises(ValueError, match="worker 1 receives messages in another order than worker 0 sends them"):
        check_program(plan, broken(program, 1, late))
    early = moved(encoder, Instruction(Op.SEND_FORWARD, 0, 1, 0), Instruction(Op.FORWARD, 0, 1))
    with pytest.raises(ValueError, match="worker 0: 0SEND_F1@0 stands before 0F1, which it needs"):
        check_program(plan, broken(program, 0, early))
    gradient_first = moved(encoder, Instruction(Op.RECV_BACKWARD, 0, 0, 0), Instruction(Op.FORWARD, 0, 0))
    with pytest.raises(ValueError, match="worker 0 waits for ever at 0RECV_B0@0: a deadlock"):
        check_program(plan, broken(program, 0, gradient_first))


def test_a_list_that_runs_too_far_ahead_is_refused_by_its_memory():
    """GPipe's list is no 1F1B list: it deadlocks nowhere, but holds all microbatches."""
    gpipe, plan = disjoint(num_microbatches=4, schedule="gpipe"), disjoint(num_microbatches=4)
    with pytest.raises(ValueError, match="worker 0 holds activations of 4 microbatches of vision, more than 2"):
        check_program(plan, make_program(gpipe))


@properties
@given(order=orders())
def test_features_are_received_at_most_a_few_microbatches_ahead(order):
    plan, frozen, slots = order
    program = make_program(plan, TrainedSet(frozen), slots)
    for items in program.instructions:
        done = {(item.node, item.microbatch): number for number, item in enumerate(items) if item.op is Op.FORWARD}
        for number, item in enumerate(items):
            if item.op is Op.RECV_FORWARD and program.edges[item.edge].is_bridge and item.microbatch >= AHEAD:
                assert done[item.node, item.microbatch - AHEAD] < number


@properties
@given(plan=plans())
def test_no_worker_receives_over_the_channel_over_which_it_sends_hidden_states_on(plan):
    program = make_program(plan)
    for items in program.instructions:
        used = {True: set(), False: set()}
        for item in items:
            edge = program.edges[item.edge] if item.edge >= 0 else None
            if edge and not edge.is_bridge and not item.op.is_wait:
                used[item.op.is_send].add(edge.channel(item.op.is_forward))
        assert not used[True] & used[False]
