"""The check that a program can be run: everything once, transfers that match, no deadlock, bounded memory.

It executes the instruction lists as the trainer does, but without computing. A send never waits. A receive waits for
its message. Messages between two workers over one channel (see `routes`) arrive in the order in which they were sent,
as with NCCL.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan
from dflop.plan.schedules import SCHEDULES
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.step.instructions import Instruction, Op, Program
from dflop.step.nodes import StageReplicas, stages_of
from dflop.step.routes import Route, make_routes

__all__ = ["check_program", "most_in_flight"]

_SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)


def check_program(plan: Plan, program: Program, trained: TrainedSet = EVERYTHING) -> None:
    """Check the instruction lists of all workers. `trained` is what the program was made for.

    Raises:
        ValueError: naming what is wrong, and the node or worker.
    """
    _check_that_nodes_do_everything_once(program, trained)
    _carry_out(program, trained)
    for stage in stages_of(plan):
        bound = most_in_flight(plan, stage)
        for replica in range(stage.dp):
            worker = stage.first_worker + replica * stage.span
            own = {node for node in program.workers[worker].nodes if program.nodes[node].module == stage.module}
            held = _in_flight(program.instructions[worker], own)
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


def _check_that_nodes_do_everything_once(program: Program, trained: TrainedSet) -> None:
    for index, worker in enumerate(program.workers):
        for node in worker.nodes:
            own = [item for item in program.instructions[index] if item.node == node]
            place = {(item.op, item.microbatch): number for number, item in enumerate(own) if item.edge < 0}
            expected = {(op, microbatch) for op in _passes(program.nodes[node].module, trained)
                        for microbatch in range(program.num_microbatches)}  # fmt: skip
            num_computed = sum(item.edge < 0 for item in own)
            if set(place) != expected | {(Op.SYNC_GRADIENTS, -1)} or num_computed != len(place):
                raise ValueError(f"node {node} on worker {index} does not do every microbatch once in each direction")
            for item in own:
                _check_place(item, place, node)


def _passes(module: str, trained: TrainedSet) -> tuple[Op, ...]:
    return (Op.FORWARD, Op.BACKWARD) if trained.has_backward(module) else (Op.FORWARD,)


def _check_place(item: Instruction, place: dict[tuple[Op, int], int], node: int) -> None:
    """Check that a node computes a microbatch's forward before its backward, and syncs last."""
    if item.op not in (Op.FORWARD, Op.BACKWARD):
        return
    number = place[item.op, item.microbatch]
    if place[Op.FORWARD, item.microbatch] > number:
        raise ValueError(f"node {node}: {item} stands before what it needs")
    if number > place[Op.SYNC_GRADIENTS, -1]:
        raise ValueError(f"node {node}: {item} stands behind the gradient sync")


def _carry_out(program: Program, trained: TrainedSet) -> None:
    """Execute all workers' lists side by side, without computing."""
    carriers: dict[int, list[int]] = defaultdict(list)
    for index, worker in enumerate(program.workers):
        for node in worker.nodes:
            carriers[node].append(index)
    world = _World(program, trained)
    done = [0] * len(program.workers)
    moved = True
    while moved:
        moved = False
        for index, items in enumerate(program.instructions):
            while done[index] < len(items):
                item = items[done[index]]
                # A transfer is a worker's own; all of a node's workers compute together.
                together = [index] if item.edge >= 0 else carriers[item.node]
                if any(_next(program, other, done) != item for other in together):
                    break
                if not world.carry_out(item, together):
                    break
                for other in together:
                    done[other] += 1
                moved = True
    for index, items in enumerate(program.instructions):
        if done[index] < len(items):
            raise ValueError(f"worker {index} waits for ever at {items[done[index]]}: a deadlock")
    world.check_that_all_mail_is_taken()


def _next(program: Program, worker: int, done: list[int]) -> Instruction | None:
    items = program.instructions[worker]
    return items[done[worker]] if done[worker] < len(items) else None


class _World:
    """What was computed, sent and received so far."""

    def __init__(self, program: Program, trained: TrainedSet) -> None:
        self._edges, self._routes = program.edges, make_routes(program.workers, program.edges)
        # The edges whose messages a worker must have received before a computation: forward and backward, by node.
        self._needed: dict[tuple[bool, int, int], list[int]] = defaultdict(list)
        for number, edge in enumerate(program.edges):
            for route in self._routes.of(number, True):
                self._needed[True, edge.target, route.receiver].append(number)
            if trained.has_backward(program.nodes[edge.source].module):
                for route in self._routes.of(number, False):
                    self._needed[False, edge.source, route.receiver].append(number)
        self._mail: dict[Route, deque[tuple[int, int]]] = defaultdict(deque)
        self._received: set[tuple[bool, int, int, int]] = set()
        self._made: set[tuple[bool, int, int]] = set()

    def carry_out(self, item: Instruction, workers: Sequence[int]) -> bool:
        """Execute a computation of these workers together, or a transfer of one worker; False while its message is
        missing."""
        forward = item.op.is_forward
        if item.edge >= 0:
            (worker,) = workers
            if item.op in _SENDS:
                self._send(item, worker)
                return True
            return self._receive(item, worker)
        if item.op in (Op.FORWARD, Op.BACKWARD):
            for worker in workers:
                for edge in self._needed[forward, item.node, worker]:
                    if (forward, edge, item.microbatch, worker) not in self._received:
                        raise ValueError(f"{item} is computed before edge {edge} is received")
            self._made.add((forward, item.node, item.microbatch))
        return True

    def _send(self, item: Instruction, worker: int) -> None:
        forward, edge = item.op.is_forward, self._edges[item.edge]
        maker = edge.source if forward else edge.target
        routes = [route for route in self._routes.of(item.edge, forward) if route.sender == worker]
        if item.node != maker or not routes or (forward, item.node, item.microbatch) not in self._made:
            raise ValueError(f"{item} sends what its node has not made")
        for route in routes:
            self._mail[route].append((item.edge, item.microbatch))

    def _receive(self, item: Instruction, worker: int) -> bool:
        forward = item.op.is_forward
        routes = [route for route in self._routes.of(item.edge, forward) if route.receiver == worker]
        if not routes:
            raise ValueError(f"{item} receives what nobody sends to worker {worker}")
        (box,) = (self._mail[route] for route in routes)
        if not box:
            return False
        if box.popleft() != (item.edge, item.microbatch):
            raise ValueError(
                f"{item} awaits another message than the one that comes: the two ends differ in their order"
            )
        self._received.add((forward, item.edge, item.microbatch, worker))
        return True

    def check_that_all_mail_is_taken(self) -> None:
        for route, box in self._mail.items():
            if box:
                raise ValueError(
                    f"worker {route.receiver} never receives what worker {route.sender} sends over edge {box[0][0]}"
                )


def _in_flight(items: tuple[Instruction, ...], nodes: set[int]) -> int:
    """The most microbatches between their forward on one of the nodes and the end of their backward there."""
    own = [item.op for item in items if item.node in nodes]
    if Op.BACKWARD not in own:
        return 0
    held = most = 0
    for op in own:
        held += (op is Op.FORWARD) - (op is Op.BACKWARD)
        most = max(most, held)
    return most
