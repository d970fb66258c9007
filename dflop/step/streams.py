"""A model of GPUs and NCCL: whether all that a program's workers issue comes to an end.

The model is stricter than the hardware. A worker issues its list in order, into streams: one for computations, and one
for each channel of messages. Streams may share hardware queues, in the worst case all of them one. A queue is in order:
what stands behind an operation does not begin before that has ended. Sends and receives of one place and channel are
one operation, as `batch_isend_irecv` makes them: it begins when all that was computed so far has ended, and ends when
the other end of each of its messages has begun, too; nothing is buffered. What a node computes begins when the messages
that it waits for have ended, and those that its worker sent and keeps no longer (`Kept`). In the middle of it
stands one collective, such as a sum over tensor-parallel ranks or a gather of shared parameters, in the stream of its
communicator. That ends when all workers have begun it that take part: those of the node, and those of the replicas that
share its parameters. The ranks of a worker act as one here, so each also waits for what the others wait for.

With `num_sms`, an operation that has begun holds SMs of its worker's GPUs until it has ended: a message few, a
collective more, a computation one at least. What finds too few does not begin. Of all that could begin, messages and
collectives come first.

Other collectives stand where training on GPUs issues them, each in the stream of its communicator. The step begins with
the sum over all ranks that ends the one before, and with gathers of updated parameters, for which a node's first
forward waits. The two ends of the LLM's pipeline exchange a tied embedding behind that, and its gradient in the
gradient sync. In the middle of a node's last backward, gradients begin to be summed: over the node's replicas or,
where these share parameters, over the copies. The gradient sync begins the sums that are left, and waits for all of
them; then a node's tensor-parallel ranks sum the gradients of which each has a part. A group of one rank sums and
gathers nothing; its collectives stand here, too, and wait for no other rank. Without a collective there is only less to
wait for, so what ends with all of them ends without some.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from dflop.base.devices import MESSAGE_CTAS
from dflop.step.communicators import COLLECTIVE_CTAS
from dflop.step.instructions import Instruction, Kept, Op, Program, instructions_together
from dflop.step.routes import make_routes

__all__ = ["unfinished"]


@dataclass(slots=True)
class _Operation:
    """What a worker issues, by its first instruction. It begins when all in `needs` have ended, and ends when all of
    its meetings with other workers have begun on all of them. It holds `num_ctas` SMs."""

    first: Instruction
    worker: int
    stream: int
    needs: list["_Operation"]
    meetings: list[Hashable] = field(default_factory=list)
    num_ctas: int = 1
    num_open: int = -1  # meetings that have not begun everywhere; negative before the operation begins

    @property
    def has_begun(self) -> bool:
        return self.num_open >= 0

    @property
    def has_ended(self) -> bool:
        return self.num_open == 0


# The stream of the first process group; those of channels come before.
_FIRST_GROUP = 9


def _ends_of(program: Program) -> dict[int, int]:
    """The nodes at the two ends of the LLM's pipeline, where these are on different workers, with their replica."""
    last = max(node.pp_stage for node in program.nodes if node.module == "llm")
    ends = {
        number: node.dp_rank
        for number, node in enumerate(program.nodes)
        if node.module == "llm" and node.pp_stage in (0, last)
    }
    on_one_worker = last == 0 or any(len(ends.keys() & set(worker.nodes)) > 1 for worker in program.workers)
    return {} if on_one_worker else ends


def _always(edge: int, microbatch: int) -> bool:
    return True


def unfinished(
    program: Program,
    num_queues: int | None = None,
    has_message: Callable[[int, int], bool] = _always,
    *,
    is_tied: bool = True,
    num_sms: int | None = None,
) -> dict[int, Instruction]:
    """By worker, the instruction at which it waits for ever; empty where everything ends.

    `num_queues` are the hardware queues that a worker's streams share, None for one each. `has_message` tells for an
    edge and a microbatch whether there is anything to send. Where the LLM's head is not tied to its embedding
    (`is_tied`), the ends of its pipeline exchange nothing. `num_sms` are those of a GPU, None for any number.
    """
    return _World(program, num_queues, has_message, is_tied=is_tied, num_sms=num_sms).run()


class _World:
    """All workers' queues, and who has come to which meeting."""

    def __init__(
        self,
        program: Program,
        num_queues: int | None,
        has_message: Callable[[int, int], bool],
        *,
        is_tied: bool,
        num_sms: int | None,
    ) -> None:
        self._program, self._has_message = program, has_message
        self._routes = make_routes(program.workers, program.edges)
        self._ends = _ends_of(program) if is_tied else {}
        self._num_free = None if num_sms is None else [num_sms] * len(program.workers)
        self._queues: list[dict[int, deque[_Operation]]] = []
        self._num_expected: Counter[Hashable] = Counter()
        self._came: dict[Hashable, list[_Operation]] = defaultdict(list)
        self._stream_of: dict[str, int] = defaultdict(lambda: _FIRST_GROUP + len(self._stream_of))
        for worker, instructions in enumerate(program.instructions):
            queues: dict[int, deque[_Operation]] = defaultdict(deque)
            for operation in self._issued(worker, instructions):
                queues[operation.stream if num_queues is None else operation.stream % num_queues].append(operation)
                self._num_expected.update(operation.meetings)
            self._queues.append(dict(sorted(queues.items(), reverse=True)))  # that of computations comes last

    def run(self) -> dict[int, Instruction]:
        """Carry out whatever can begin, until nothing can."""
        to_do = list(range(len(self._queues)))
        while to_do:
            worker = to_do.pop()
            for queue in self._queues[worker].values():
                to_do += self._advance(queue)
        heads = {
            worker: [queue[0].first for queue in queues.values() if queue] for worker, queues in enumerate(self._queues)
        }
        return {worker: min(first, key=lambda item: item.place) for worker, first in heads.items() if first}

    def _advance(self, queue: deque[_Operation]) -> Iterator[int]:
        """Begin and end what stands at the head of a queue; gives the workers for which something has changed."""
        while queue:
            operation = queue[0]
            if not operation.has_begun:
                if not all(needed.has_ended for needed in operation.needs) or not self._take_sms(operation):
                    return
                operation.num_open = len(operation.meetings)
                for meeting in operation.meetings:
                    self._came[meeting].append(operation)
                    if len(self._came[meeting]) == self._num_expected[meeting]:
                        for other in self._came[meeting]:
                            other.num_open -= 1
                            yield other.worker
            if not operation.has_ended:
                return
            queue.popleft()
            if self._num_free is not None:
                self._num_free[operation.worker] += operation.num_ctas
            if not operation.meetings or self._num_free is not None:
                yield operation.worker

    def _take_sms(self, operation: _Operation) -> bool:
        """Whether the operation has found its SMs, which it holds from now on."""
        if self._num_free is not None:
            if self._num_free[operation.worker] < operation.num_ctas:
                return False
            self._num_free[operation.worker] -= operation.num_ctas
        return True

    def _issued(self, worker: int, instructions: Sequence[Instruction]) -> Iterator[_Operation]:
        """The operations that a worker issues, in order."""
        computed: list[_Operation] = []  # the last computation
        awaited: list[_Operation] = []
        under_way: dict[int, list[_Operation]] = defaultdict(list)  # by node: gathers, later sums
        receiving: dict[tuple[bool, int, int], _Operation] = {}
        sending: list[tuple[Instruction, _Operation]] = []  # what is sent and still kept
        kept = Kept(instructions, self._program.edges)
        for operation in self._before(worker, instructions[:1], under_way):
            yield operation
            computed = [operation] if operation.stream == 0 else computed
        for is_message, items in instructions_together(instructions):
            if is_message:
                by_channel: dict[int, _Operation] = {}
                for item in items:
                    if not self._has_message(item.edge, item.microbatch):
                        continue
                    channel = self._program.edges[item.edge].channel(item.op.is_forward)
                    if channel not in by_channel:
                        by_channel[channel] = _Operation(
                            item, worker, 1 + channel, list(computed), num_ctas=MESSAGE_CTAS
                        )
                    operation = by_channel[channel]
                    operation.meetings += self._messages(worker, item)
                    if item.op.is_receive:
                        receiving[item.op.is_forward, item.edge, item.microbatch] = operation
                    else:
                        sending.append((item, operation))
                yield from (by_channel[channel] for channel in sorted(by_channel))
                continue
            for item in items:
                if item.op.is_wait:
                    if self._has_message(item.edge, item.microbatch):
                        awaited.append(receiving[item.op.is_forward, item.edge, item.microbatch])
                    continue
                awaited += under_way.pop(item.node, ()) if item.op is not Op.BACKWARD else ()
                for operation in self._computed(worker, item, computed, awaited, under_way):
                    yield operation
                    computed = [operation] if operation.stream == 0 else computed
                kept.compute(item)
                awaited = [operation for send, operation in sending if not kept.has(send)]
                sending = [(send, operation) for send, operation in sending if kept.has(send)]

    def _before(
        self, worker: int, first: Sequence[Instruction], under_way: dict[int, list[_Operation]]
    ) -> Iterator[_Operation]:
        """What stands before a worker's first instruction: the end of the step before, and the update."""
        for item in first:
            ended = self._collective(item, worker, "world", [], "ended")
            yield ended
            computed = _Operation(item, worker, 0, [ended])
            yield computed
            nodes = self._program.workers[worker].nodes
            for node in nodes:
                if self._num_shards(node) == 1:
                    about = self._program.nodes[node]
                    gather = self._collective(item, worker, about.module, [computed], "gather", about.pp_stage)
                    under_way[node].append(gather)
                    yield gather
                    if node in self._ends:  # the tied embedding is sent on
                        computed = _Operation(item, worker, 0, [gather])
                        yield computed
            for node in self._ends.keys() & set(nodes):
                values = self._collective(item, worker, "ends", [computed], "values", self._ends[node])
                computed = _Operation(item, worker, 0, [values])
                yield from (values, computed)

    def _computed(
        self,
        worker: int,
        item: Instruction,
        computed: list[_Operation],
        awaited: list[_Operation],
        under_way: dict[int, list[_Operation]],
    ) -> Iterator[_Operation]:
        """A computation, with the collectives inside it. `computed` is the last one, and `awaited` are receives and
        collectives that it waits for."""
        about, num_shards = self._program.nodes[item.node], self._num_shards(item.node)
        if item.op is Op.SYNC_GRADIENTS and num_shards == 1:
            if item.node in self._ends:
                gradient = self._collective(item, worker, "ends", computed, "gradient", self._ends[item.node])
                computed = [_Operation(item, worker, 0, [gradient])]
                yield from (gradient, computed[0])
            left = self._collective(item, worker, about.module, computed, "left", about.pp_stage)
            summed = _Operation(item, worker, 0, [*awaited, left])
            yield from (left, summed)
            partial = self._collective(item, worker, f"inside {about.module}", [summed], "partial", item.node)
            yield from (partial, _Operation(item, worker, 0, [partial]))
            return
        begun = _Operation(item, worker, 0, awaited)
        inside = f"inside {about.module}"
        together = self._collective(item, worker, inside, [begun], self._computed_together(item))
        whole = _Operation(item, worker, 0, [together])
        yield from (begun, together, whole)
        if item.op is Op.BACKWARD and item.microbatch == self._program.num_microbatches - 1:
            group = about.module if num_shards == 1 else f"copies of {about.module}"
            sums = self._collective(item, worker, group, [whole], "sum", about.pp_stage, about.dp_rank % num_shards)
            under_way[item.node] = [sums]
            second = self._collective(item, worker, inside, [whole], "second half", self._computed_together(item))
            yield from (sums, second, _Operation(item, worker, 0, [second]))

    def _collective(
        self, item: Instruction, worker: int, group: str, needs: list[_Operation], *what: Hashable
    ) -> _Operation:
        """A worker's part of a collective in the stream of a communicator."""
        return _Operation(item, worker, self._stream_of[group], needs, [(group, *what)], COLLECTIVE_CTAS)

    def _num_shards(self, node: int) -> int:
        return self._program.num_shards[self._program.nodes[node].module]

    def _messages(self, worker: int, item: Instruction) -> Iterator[Hashable]:
        """The messages of which the worker has an end. Two workers meet for each."""
        for route in self._routes.of(item.edge, item.op.is_forward):
            if worker == (route.sender if item.op.is_send else route.receiver):
                yield item.op.is_forward, item.edge, item.microbatch, route

    def _computed_together(self, item: Instruction) -> Hashable:
        """What all workers have in common that compute together: those of the replicas of a stage in a sync of
        gradients, those of the replicas that share parameters or samples in every pass, else those of one node."""
        node = self._program.nodes[item.node]
        num_replicas = max(self._program.num_shards[node.module], self._program.cp[node.module])
        if item.op is Op.SYNC_GRADIENTS:
            num_replicas = len(self._program.nodes)
        return item.op, node.module, node.pp_stage, node.dp_rank // num_replicas, item.microbatch
