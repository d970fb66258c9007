"""The check that a program can be run: everything once and in order, no deadlock, bounded memory."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan
from dflop.plan.schedules import SCHEDULES
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.step.instructions import Instruction, Op, Program
from dflop.step.nodes import StageReplicas, stages_of
from dflop.step.routes import make_routes
from dflop.step.streams import unfinished

__all__ = ["FEWEST_SMS", "check_program", "most_in_flight"]

# SMs of an A100, the fewest of the devices in `base/devices.yaml`.
FEWEST_SMS = 108


def check_program(plan: Plan, program: Program, trained: TrainedSet = EVERYTHING) -> None:
    """Check the instruction lists of all workers. `trained` is what the program was made for.

    Raises:
        ValueError: naming what is wrong, and the node or worker.
    """
    ends = _message_ends(program, trained)
    for worker in range(len(program.workers)):
        _check_list(program, worker, ends[worker], trained)
    _check_that_both_ends_agree(program)
    # What ends in one queue ends in several. But in one queue only one operation at a time holds SMs.
    for worker, item in (unfinished(program, num_queues=1) or unfinished(program, num_sms=FEWEST_SMS)).items():
        raise ValueError(f"worker {worker} waits for ever at {item}: a deadlock")
    for stage in stages_of(plan):
        bound = most_in_flight(plan, stage)
        for replica in range(stage.dp):
            worker = stage.first_worker + replica * stage.span
            nodes = {node for node in program.workers[worker].nodes if program.nodes[node].module == stage.module}
            held = _in_flight(program.instructions[worker], nodes)
            if held > bound:
                raise ValueError(
                    f"worker {worker} holds activations of {held} microbatches of {stage.module}, more than {bound}"
                )


def most_in_flight(plan: Plan, stage: StageReplicas) -> int:
    """The most microbatches whose activations of the stage's module a worker holds at a time.

    Where a worker has several chunks of the LLM, a microbatch counts once for each chunk. For the LLM's stages the
    number follows from their schedule. An encoder on ranks of its own runs ahead of the LLM's first stage by the stages
    between them. An encoder that shares ranks either follows the first stage or may do all of its forwards first.
    """
    schedule, placement = SCHEDULES[plan.schedule], PLACEMENTS[plan.placement]
    pp, count, num_chunks = plan.grid("llm").pp, plan.num_microbatches, plan.num_chunks
    if stage.module == "llm":
        place = stage.pp_stage % pp
        return min(count * num_chunks, schedule.ahead(place, pp, count, num_chunks) + 1)
    if placement.uses_all_ranks:
        return count
    bound = schedule.most_ahead_of_first(pp, count, num_chunks)
    if not placement.shares_ranks:
        bound += schedule.encoder_lead(pp) + plan.grid(stage.module).pp - stage.pp_stage
    return min(count, bound)


class _End(NamedTuple):
    """A worker's end of the messages over an edge: the node that it carries there, and what it does for a message."""

    node: int
    edge: int
    is_forward: bool
    ops: tuple[Op, ...]


_SENDS = {True: (Op.SEND_FORWARD,), False: (Op.SEND_BACKWARD,)}
_RECEIVES = {True: (Op.RECV_FORWARD, Op.WAIT_FORWARD), False: (Op.RECV_BACKWARD, Op.WAIT_BACKWARD)}


def _message_ends(program: Program, trained: TrainedSet) -> dict[int, list[_End]]:
    """Each worker's ends, by the routes of messages."""
    routes, ends = make_routes(program.workers, program.edges), defaultdict(list)
    for number, edge in enumerate(program.edges):
        for is_forward, maker, taker in ((True, edge.source, edge.target), (False, edge.target, edge.source)):
            if is_forward or trained.has_backward(program.nodes[edge.source]):
                for sender in {route.sender for route in routes.of(number, is_forward)}:
                    ends[sender].append(_End(maker, number, is_forward, _SENDS[is_forward]))
                for route in routes.of(number, is_forward):
                    ends[route.receiver].append(_End(taker, number, is_forward, _RECEIVES[is_forward]))
    return ends


def _check_list(program: Program, worker: int, ends: list[_End], trained: TrainedSet) -> None:
    """Check that a worker does everything once, and nothing before what it needs."""
    items = program.instructions[worker]
    expected = {Instruction(Op.SYNC_GRADIENTS, node) for node in program.workers[worker].nodes}
    for microbatch in range(program.num_microbatches):
        for node in program.workers[worker].nodes:
            expected.add(Instruction(Op.FORWARD, node, microbatch))
            if trained.has_backward(program.nodes[node]):
                expected.add(Instruction(Op.BACKWARD, node, microbatch))
        expected |= {Instruction(op, end.node, microbatch, end.edge) for end in ends for op in end.ops}
    done = Counter(replace(item, place=-1) for item in items)
    for item in [*done, *expected]:
        if done[item] != (item in expected):
            raise ValueError(f"worker {worker} does {item} {done[item]} times, not {int(item in expected)} times")
    place = {replace(item, place=-1): number for number, item in enumerate(items)}
    for item in expected:
        for before in _before(item, ends):
            if place[before] > place[item]:
                raise ValueError(f"worker {worker}: {item} stands before {before}, which it needs")
        if item.edge < 0 and place[item] > place[Instruction(Op.SYNC_GRADIENTS, item.node)]:
            raise ValueError(f"worker {worker}: {item} stands behind the gradient sync")


def _before(item: Instruction, ends: list[_End]) -> Iterator[Instruction]:
    """What must stand before an instruction in its worker's list."""
    node, microbatch, is_forward = item.node, item.microbatch, item.op.is_forward
    if item.op.is_send:
        yield Instruction(Op.FORWARD if is_forward else Op.BACKWARD, node, microbatch)
    elif item.op.is_wait:
        yield Instruction(Op.RECV_FORWARD if is_forward else Op.RECV_BACKWARD, node, microbatch, item.edge)
    elif item.op in (Op.FORWARD, Op.BACKWARD):
        if not is_forward:
            yield Instruction(Op.FORWARD, node, microbatch)
        for end in ends:
            if end.node == node and end.is_forward == is_forward and end.ops is _RECEIVES[is_forward]:
                yield Instruction(end.ops[-1], node, microbatch, end.edge)


def _check_that_both_ends_agree(program: Program) -> None:
    """Check that all messages between two workers over one channel are sent in the order in which they are received."""
    routes = make_routes(program.workers, program.edges)
    sent, received = defaultdict(list), defaultdict(list)
    for worker, items in enumerate(program.instructions):
        for item in items:
            if item.op.is_send or item.op.is_receive:
                is_forward = item.op.is_forward
                for route in routes.of(item.edge, is_forward):
                    if worker == (route.sender if item.op.is_send else route.receiver):
                        way = route, program.edges[item.edge].channel(is_forward)
                        (sent if item.op.is_send else received)[way].append((item.edge, item.microbatch))
    for way, messages in sent.items():
        route, _ = way
        if messages != received[way]:
            raise ValueError(
                f"worker {route.receiver} receives messages in another order than worker {route.sender} sends them"
            )


def _in_flight(items: tuple[Instruction, ...], nodes: set[int]) -> int:
    """The most microbatches between their forward on one of the nodes and the end of their backward there."""
    ops = [item.op for item in items if item.node in nodes]
    if Op.BACKWARD not in ops:
        return 0
    return int(np.cumsum([(op is Op.FORWARD) - (op is Op.BACKWARD) for op in ops]).max())
