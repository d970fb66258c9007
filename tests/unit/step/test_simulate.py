"""The simulator's times are those of textbook pipelines, and of a slow walk along every instruction.

The oracle takes the program's lists literally: a computation starts when all workers that take part in it have
ended their last one and every message that its node receives has arrived. The early part of a node's sync starts with
its last backward, and waits for other early parts of the worker. Late parts follow each other from the start of the
step on, and a node's first forward does not end before its own. Carried messages have an oracle of their own, which
goes through the lists of all workers by place.
"""

import dataclasses
import itertools
from collections import defaultdict

import numpy as np
import pytest
from drawn_plans import llm_alone, orders, plans
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import disjoint

from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.step import (
    Bridges,
    CompiledPlan,
    Instruction,
    Op,
    Program,
    StageTimes,
    compile_plan,
    make_program,
    nodes_of,
    peak_bytes,
    simulate,
    simulate_step_s,
    stages_of,
    workers_of,
)
from dflop.step.instructions import Kept, kept_until
from dflop.step.routes import make_routes

PASS_OF = {Op.FORWARD: 0, Op.BACKWARD: 1}


def walk(plan: Plan, times: StageTimes, frozen=(), slots=None) -> tuple[np.ndarray, np.ndarray, float]:
    """Starts and ends [2, num_nodes, num_microbatches] and the step time, one instruction after the other."""
    walked = Walk(plan, times, make_program(plan, TrainedSet(frozen), slots))
    while any(walked.advance(worker) for worker in range(len(walked.done))):
        ...
    assert walked.done == [len(items) for items in walked.instructions]
    return walked.start_s, walked.end_s, float(walked.clocks.max())


class Walk:
    """The state of a walk: what each worker has done, and when. Methods are False where a worker must wait."""

    def __init__(self, plan: Plan, times: StageTimes, program: Program) -> None:
        self.times, self.program, self.instructions = times, program, program.instructions
        num_nodes, num_workers = len(program.nodes), len(program.workers)
        self.carriers = [
            [w for w, worker in enumerate(program.workers) if node in worker.nodes] for node in range(num_nodes)
        ]
        self.sharers = []  # of each node: the nodes that it meets in each layer
        for index, node in enumerate(program.nodes):
            num_meeting = plan.grid(node.module).num_meeting
            first = index - node.dp_rank % num_meeting
            self.sharers.append(list(range(first, first + num_meeting)))
        columns = (getattr(times.bridges, name).tolist() for name in ("source", "target", "microbatch", "seconds"))
        self.bridge_s = {tuple(key): seconds for *key, seconds in zip(*columns, strict=True)}
        self.start_s = np.full((2, num_nodes, plan.num_microbatches), np.nan)
        self.end_s, self.clocks, self.early_ends = self.start_s.copy(), np.zeros(num_workers), np.zeros(num_workers)
        nothing, late_ends = np.zeros(num_nodes), np.zeros(num_workers)
        self.early_s = nothing if times.early_sync_s is None else times.early_sync_s
        self.late_s = nothing if times.late_sync_s is None else times.late_sync_s
        self.given_s = nothing.copy()
        for worker, items in enumerate(self.instructions):
            for node in dict.fromkeys(item.node for item in items if item.op is Op.FORWARD):
                late_ends[worker] += self.late_s[node]
                self.given_s[node] = max(self.given_s[node], late_ends[worker])
        self.last = {
            (item.node, item.op)
            for items in self.instructions
            for item in {item.node: item for item in items if item.op in PASS_OF}.values()
        }
        self.arrived, self.done = {}, [0] * num_workers

    def advance(self, worker: int) -> bool:
        """Carry out the worker's next instructions up to one that has to wait. True if any was carried out."""
        before = self.done[worker]
        while self.done[worker] < len(self.instructions[worker]) and self.carry_out(worker):
            ...
        return self.done[worker] > before

    def carry_out(self, worker: int) -> bool:
        item = self.instructions[worker][self.done[worker]]
        # Each worker is done with transfers on its own, and with the sync: that its replicas wait for each other ends
        # no step later.
        together = [worker]
        if item.op is Op.SYNC_GRADIENTS:
            self.clocks[worker] = max(self.clocks[worker], self.early_ends[worker]) + self.times.sync_s[item.node]
            self.clocks[worker] -= self.early_s[item.node] + self.late_s[item.node]
        elif item.edge < 0:
            nodes = self.sharers[item.node] if item.op in PASS_OF else [item.node]
            wanted = {w: dataclasses.replace(item, node=node) for node in nodes for w in self.carriers[node]}
            if any(self.instructions[w][self.done[w] : self.done[w] + 1] != (its,) for w, its in wanted.items()):
                return False
            together = list(wanted)
        if item.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD) and not self.receive(item):
            return False
        if item.op in PASS_OF:
            self.compute(item, together)
        for w in together:
            self.done[w] += 1
        return True

    def receive(self, item: Instruction) -> bool:
        edge, which = self.program.edges[item.edge], int(item.op is Op.RECV_BACKWARD)
        seconds = self.times.chain_s[edge.source, item.microbatch]
        if edge.is_bridge:
            seconds = self.bridge_s.get((edge.source, edge.target, item.microbatch))
        if seconds is None:  # nothing is sent
            return True
        sent_s = self.end_s[which, (edge.source, edge.target)[which], item.microbatch]
        if np.isnan(sent_s):
            return False
        key = which, item.node, item.microbatch
        self.arrived[key] = max(self.arrived.get(key, 0.0), sent_s + seconds)
        return True

    def compute(self, item: Instruction, together: list[int]) -> None:
        """A pass on all nodes that share its parameters: they wait for each other, and end together."""
        seconds = {Op.FORWARD: self.times.forward_s, Op.BACKWARD: self.times.backward_s}[item.op][:, item.microbatch]
        nodes = self.sharers[item.node]
        cells = [(PASS_OF[item.op], node, item.microbatch) for node in nodes]
        ready_s = max([*(self.arrived.get(cell, 0.0) for cell in cells), *self.clocks[together]])
        if item.op is Op.FORWARD and item.microbatch == 0:
            ready_s = max([ready_s, *(self.given_s[node] - seconds[node] for node in nodes)])
        ended_s = ready_s + max(seconds[node] for node in nodes)
        for cell, node in zip(cells, nodes, strict=True):
            self.start_s[cell], self.end_s[cell] = ended_s - seconds[node], ended_s
            if item.microbatch == self.start_s.shape[2] - 1 and (node, item.op) in self.last:
                for w in self.carriers[node]:
                    self.early_ends[w] = max(self.early_ends[w], self.start_s[cell]) + self.early_s[node]
        self.clocks[together] = ended_s


def carried(plan: Plan, times: StageTimes, frozen, slots) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, ends and when each worker has computed, if workers issue the messages of a place and channel together,
    and channels carry their operations one after the other."""
    program = make_program(plan, TrainedSet(frozen), slots)
    walked, routes = Walk(plan, times, program), make_routes(program.workers, program.edges)
    learning = {item.node for items in program.instructions for item in items if item.op is Op.BACKWARD}
    at_place = defaultdict(lambda: (set(), set()))
    for worker, items in enumerate(program.instructions):
        for item in items:
            if item.op in PASS_OF:
                at_place[item.place][0].add((item.op, item.node, item.microbatch))
            elif item.op.is_send or item.op.is_receive:
                at_place[item.place][1].add((worker, item))
    free_s, kept_s, let_go_s = defaultdict(float), defaultdict(float), np.zeros(len(walked.clocks))
    for _, (computed, issued) in sorted(at_place.items()):
        for op, node, microbatch in computed:
            which, nodes = PASS_OF[op], walked.sharers[node]
            if not np.isnan(walked.end_s[which, node, microbatch]):
                continue  # with another that shares its parameters
            seconds = (times.forward_s, times.backward_s)[which][:, microbatch]
            workers = sorted({worker for own in nodes for worker in walked.carriers[own]})
            arrived_s = [walked.arrived.get((which, own, microbatch), 0.0) for own in nodes]
            begin_s = max([*arrived_s, *walked.clocks[workers], *let_go_s[workers]])
            if which == 0 and microbatch == 0:
                begin_s = max([begin_s, *(walked.given_s[own] - seconds[own] for own in nodes)])
            end_s = begin_s + seconds[nodes].max()
            walked.clocks[workers], walked.end_s[which, nodes, microbatch] = end_s, end_s
            walked.start_s[which, nodes, microbatch] = end_s - seconds[nodes]
            for own in nodes:
                for worker in walked.carriers[own]:
                    let_go_s[worker] = kept_s[worker, (op, own, microbatch)]
        messages, ready_s = [], defaultdict(float)
        for sender, send in issued:
            edge, is_forward = program.edges[send.edge], send.op.is_forward
            seconds = times.chain_s[edge.source, send.microbatch]
            if edge.is_bridge:
                seconds = walked.bridge_s.get((edge.source, edge.target, send.microbatch))
            if seconds is None or not send.op.is_send:
                continue
            maker, taker = (edge.source, edge.target) if is_forward else (edge.target, edge.source)
            ready = sender, edge.channel(is_forward)
            ready_s[ready] = max(ready_s[ready], walked.end_s[int(not is_forward), maker, send.microbatch])
            for route in routes.of(send.edge, is_forward):
                receives = [item for worker, item in issued if worker == route.receiver and item.op.is_receive]
                assert [item.edge for item in receives if item.node == taker].count(send.edge) == 1
                if route.sender == sender:
                    messages.append((route, ready[1], seconds, (int(not is_forward), taker, send.microbatch), send))
        ended_s = defaultdict(float)
        for route, channel, seconds, *_ in messages:
            ends = [(worker, channel) for worker in route]
            arrived_s = max(max(ready_s[end], free_s[end]) for end in ends) + seconds
            for end in ends:
                ended_s[end] = max(ended_s[end], arrived_s)
        for route, channel, _, key, send in messages:
            walked.arrived[key] = max(walked.arrived.get(key, 0.0), ended_s[route.receiver, channel])
            until = route.sender, kept_until(send, program.edges[send.edge], send.node in learning)
            kept_s[until] = max(kept_s[until], ended_s[route.sender, channel])
        free_s |= ended_s
    return walked.start_s, walked.end_s, walked.clocks


def make_times(compiled: CompiledPlan, forward_s=1.0, backward_s=2.0, chain_s=0.0, sync_s=0.0, bridges=None):
    shape = (compiled.num_nodes, compiled.num_microbatches)
    full = [np.broadcast_to(np.asarray(value, dtype=float), shape).copy() for value in (forward_s, backward_s, chain_s)]
    return StageTimes(
        forward_s=full[0],
        backward_s=full[1],
        chain_s=full[2],
        bridges=bridges or Bridges.none(),
        sync_s=np.broadcast_to(np.asarray(sync_s, dtype=float), shape[:1]).copy(),
    )


def all_bridges(plan: Plan, seconds=0.0) -> Bridges:
    """A message over every bridge for every microbatch."""
    return some_bridges(plan, lambda source, target, microbatch: seconds)


def some_bridges(plan: Plan, seconds_of) -> Bridges:
    """`seconds_of(source, target, microbatch)` is None where nothing is sent; on common workers nothing moves."""
    program, rows = make_program(plan), []
    carriers = [
        {w for w, worker in enumerate(workers_of(plan)) if node in worker.nodes} for node in range(len(nodes_of(plan)))
    ]
    for edge, microbatch in itertools.product(program.edges, range(plan.num_microbatches)):
        if not edge.is_bridge or plan.placement == "monolithic":
            continue
        seconds = seconds_of(edge.source, edge.target, microbatch)
        if seconds is not None:
            rows.append(
                (
                    edge.source,
                    edge.target,
                    microbatch,
                    0.0 if carriers[edge.source] & carriers[edge.target] else seconds,
                )
            )
    columns = np.array(rows, dtype=float).reshape(-1, 4).T
    source, target, microbatch = columns[:3].astype(np.int64)
    return Bridges(source=source, target=target, microbatch=microbatch, seconds=columns[3])


def draw_times(plan: Plan, rng: np.random.Generator, share: float) -> StageTimes:
    shape = (len(nodes_of(plan)), plan.num_microbatches)
    return StageTimes(
        forward_s=rng.exponential(1.0, shape) * (rng.random(shape) > 0.2),
        backward_s=rng.exponential(2.0, shape) * (rng.random(shape) > 0.2),
        chain_s=rng.exponential(0.5, shape),
        bridges=some_bridges(plan, lambda *_: rng.exponential(0.5) if rng.random() < share else None),
        sync_s=rng.exponential(0.5, shape[0]),
    )


@st.composite
def cases(draw):
    (plan, frozen, slots), rng = draw(orders()), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    times = draw_times(plan, rng, draw(st.sampled_from([0.0, 0.3, 1.0])))
    if draw(st.booleans()):
        goes_back = np.array([TrainedSet(frozen).has_backward(node) for node in nodes_of(plan)])
        early_s, late_s = times.sync_s * goes_back * rng.dirichlet((1.0, 1.0, 1.0), len(goes_back)).T[:2]
        times = dataclasses.replace(times, early_sync_s=early_s, late_sync_s=late_s)
    return plan, frozen, slots, times


@settings(max_examples=250)
@given(cases())
def test_starts_ends_and_the_step_are_those_of_a_walk_along_every_instruction(case):
    plan, frozen, slots, times = case
    compiled = compile_plan(plan, TrainedSet(frozen), slots)
    timeline = simulate(compiled, times)
    start_s, end_s, step_s = walk(plan, times, frozen, slots)
    np.testing.assert_allclose(timeline.start_s, start_s)
    np.testing.assert_allclose(timeline.end_s, end_s)
    assert timeline.step_s == pytest.approx(step_s)
    assert simulate_step_s(compiled, times) == timeline.step_s


@settings(max_examples=60)
@given(cases())
def test_carried_messages_go_one_after_the_other_as_in_the_instruction_lists(case):
    plan, frozen, slots, times = case
    compiled = compile_plan(plan, TrainedSet(frozen), slots)
    timeline = simulate(compiled, times, carried=True)
    start_s, end_s, computed_s = carried(plan, times, frozen, slots)
    np.testing.assert_allclose(timeline.start_s, start_s)
    np.testing.assert_allclose(timeline.end_s, end_s)
    np.testing.assert_allclose(timeline.computed_s, computed_s)
    assert timeline.step_s >= simulate_step_s(compiled, times) - 1e-9


@settings(max_examples=200)
@given(cases())
def test_idle_is_what_is_left_of_all_ranks_step_after_their_work(case):
    plan, frozen, slots, times = case
    timeline = simulate(compile_plan(plan, TrainedSet(frozen), slots), times)
    rank_s, workers = 0.0, workers_of(plan)
    for index, worker in enumerate(workers):
        work_s = sum(timeline.busy_s[node] for node in worker.nodes)
        work_s += timeline.synced_s[index] - timeline.computed_s[index]
        assert timeline.idle_of_worker[index] == pytest.approx(1 - work_s / timeline.step_s, abs=1e-9)
        rank_s += worker.num_ranks * work_s
    assert timeline.idle == pytest.approx(1 - rank_s / (plan.world_size * timeline.step_s), abs=1e-9)
    computed = ~np.isnan(timeline.end_s)
    parts = np.array([times.forward_s, times.backward_s])
    np.testing.assert_allclose(timeline.busy_s, (parts * computed).sum(axis=(0, 2)))


@settings(max_examples=100)
@given(plan=plans(), seed=st.integers(0, 1000), count=st.integers(1, 4))
def test_several_batches_at_once_take_what_each_takes_alone(plan, seed, count):
    rng, compiled = np.random.default_rng(seed), compile_plan(plan)
    listed = [
        dataclasses.replace(draw_times(plan, rng, 0.5), sync_s=np.full(compiled.num_nodes, 0.5)) for _ in range(count)
    ]
    messages = {
        name: np.concatenate([getattr(times.bridges, name) for times in listed])
        for name in ("source", "target", "microbatch", "seconds")
    }
    batch = np.repeat(np.arange(count), [len(times.bridges.source) for times in listed])
    together = StageTimes(
        **{name: np.stack([getattr(t, name) for t in listed]) for name in ("forward_s", "backward_s", "chain_s")},
        bridges=Bridges(batch=batch, **messages),
        sync_s=listed[0].sync_s,
    )
    assert simulate_step_s(compiled, together).tolist() == [simulate_step_s(compiled, times) for times in listed]


seconds = st.floats(0.1, 3.0)
stage_counts = st.integers(1, 6)
textbook = settings(max_examples=200)


@textbook
@given(
    pp=stage_counts,
    num_microbatches=st.integers(1, 16),
    f=seconds,
    b=seconds,
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_equal_stages_take_the_textbook_time_of_gpipe_and_1f1b(pp, num_microbatches, f, b, schedule):
    """(m + p - 1)(f + b): Huang et al. 2019; PipeDream-Flush, Narayanan et al. 2021, section 2.2.1."""
    compiled = compile_plan(llm_alone(pp, num_microbatches, schedule))
    timeline = simulate(compiled, make_times(compiled, f, b))
    assert timeline.step_s == pytest.approx((num_microbatches + pp - 1) * (f + b))
    assert timeline.idle == pytest.approx((pp - 1) / (num_microbatches + pp - 1))


@textbook
@given(
    pp=st.integers(1, 5),
    encoder_pp=st.integers(1, 3),
    m=st.integers(1, 12),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_encoder_stages_of_their_own_lengthen_the_pipeline(pp, encoder_pp, m, schedule):
    plan = disjoint(llm_pp=pp, vision_pp=encoder_pp, num_microbatches=m, schedule=schedule)
    compiled = compile_plan(plan)
    timeline = simulate(compiled, make_times(compiled, bridges=all_bridges(plan)))
    assert timeline.step_s == pytest.approx((m + pp + encoder_pp - 1) * 3.0)


@textbook
@given(pp=st.integers(2, 6), rounds=st.integers(1, 4), num_chunks=st.integers(2, 4), f=seconds, b=seconds)
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(pp, rounds, num_chunks, f, b):
    """m (f + b) + (p - 1)(f + b) / v, f and b being a rank's whole passes: Narayanan et al. 2021, section 2.2.2."""
    m = pp * rounds
    compiled = compile_plan(llm_alone(pp, m, "interleaved_1f1b", num_chunks))
    timeline = simulate(compiled, make_times(compiled, f / num_chunks, b / num_chunks))
    assert timeline.step_s == pytest.approx(m * (f + b) + (pp - 1) * (f + b) / num_chunks)


def test_nobody_waits_for_a_bridge_that_carries_nothing():
    """The LLM starts at once on a microbatch of text alone, while the encoder is still busy with pictures."""
    plan = disjoint(num_microbatches=2)
    compiled = compile_plan(plan)
    times = make_times(compiled, [[10.0, 10.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]], bridges=all_bridges(plan))
    assert simulate(compiled, times).start_s[0, 1].tolist() == [10.0, 20.0]
    only_the_second = some_bridges(plan, lambda source, target, microbatch: 0.0 if microbatch else None)
    times = dataclasses.replace(times, bridges=only_the_second)
    assert simulate(compiled, times).start_s[0, 1].tolist() == [0.0, 20.0]


def test_an_early_part_of_the_sync_runs_beside_the_last_backward():
    plan = disjoint(num_microbatches=2)
    compiled = compile_plan(plan)
    times = make_times(compiled, sync_s=[0.0, 3.0], bridges=all_bridges(plan))
    for early_s, exposed_s in ((0.0, 3.0), (1.5, 1.5), (2.5, 1.0)):  # a backward takes 2 s
        timeline = simulate(compiled, dataclasses.replace(times, early_sync_s=np.array([0.0, early_s])))
        assert timeline.synced_s[1] - timeline.computed_s[1] == pytest.approx(exposed_s)


def test_a_late_part_of_the_sync_runs_beside_the_first_forward():
    plan = disjoint(llm_pp=2, num_microbatches=2)
    compiled = compile_plan(plan)
    times = make_times(compiled, sync_s=[0.0, 4.0, 4.0], bridges=all_bridges(plan))
    assert simulate(compiled, times).start_s[0, :, 0].tolist() == [0.0, 1.0, 2.0]
    timeline = simulate(compiled, dataclasses.replace(times, late_sync_s=np.array([0.0, 3.5, 2.5])))
    # The first stage waits for its parameters, and the second one's have come when it has something to compute.
    assert timeline.end_s[0, :, 0].tolist() == [1.0, 3.5, 4.5]
    assert (timeline.synced_s - timeline.computed_s).tolist() == [0.0, 0.5, 1.5]


def test_a_step_without_any_work_takes_no_time_and_is_not_idle():
    compiled = compile_plan(disjoint(llm_pp=2, num_microbatches=1))
    timeline = simulate(compiled, make_times(compiled, 0.0, 0.0))
    assert (timeline.step_s, timeline.idle) == (0.0, 0.0)


@settings(max_examples=150)
@given(order=orders(), seed=st.integers(0, 1000))
def test_the_peak_is_the_fullest_moment_of_every_workers_list(order, seed):
    plan, frozen, slots = order
    rng, program = np.random.default_rng(seed), make_program(plan, TrainedSet(frozen), slots)
    cells = len(program.nodes), plan.num_microbatches
    kept, transient, sent = rng.integers(1, 100, (3, *cells)).astype(float)
    sends = {
        (item.node, item.microbatch): item
        for item in itertools.chain(*program.instructions)
        if item.op is Op.SEND_BACKWARD
    }
    sent *= [[(node, microbatch) in sends for microbatch in range(cells[1])] for node in range(cells[0])]
    peaks = peak_bytes(compile_plan(plan, TrainedSet(frozen), slots), kept, transient, sent)
    for worker, items in enumerate(program.instructions):
        held: dict[tuple[int, int], float] = {}
        under_way: dict[tuple[int, int], float] = {}
        keeps, fullest = Kept(items, program.edges), 0.0
        for item in items:
            if item.op not in PASS_OF:
                continue
            cell = (item.node, item.microbatch)
            if item.op is Op.FORWARD:
                held[cell] = kept[cell]
            fullest = max(fullest, sum(held.values()) + sum(under_way.values()) + transient[cell])
            keeps.compute(item)
            if item.op is Op.BACKWARD:
                under_way[cell] = sent[cell]
            under_way = {own: size for own, size in under_way.items() if own in sends and keeps.has(sends[own])}
            if item.op is Op.BACKWARD or not TrainedSet(frozen).has_backward(program.nodes[item.node]):
                del held[cell]
        assert peaks[worker] == pytest.approx(fullest)
        assert not held


def test_1f1b_holds_a_pipelines_depth_and_gpipe_all_microbatches():
    ones, nothing = np.ones((4, 12)), np.zeros((4, 12))
    assert peak_bytes(compile_plan(llm_alone(4, 12)), ones, nothing, nothing).tolist() == [4, 3, 2, 1]
    assert peak_bytes(compile_plan(llm_alone(4, 12, "gpipe")), ones, nothing, nothing).tolist() == [12] * 4


def test_a_plan_of_thousands_of_ranks_compiles_without_looking_at_each():
    """The order is of stages, however many replicas they have."""
    few, many = (
        compile_plan(Plan(
            placement="disjoint",
            grids=(Grid(module="vision", num_ranks=dp), Grid(module="llm", num_ranks=7 * dp, pp=7, rank_offset=dp)),
            num_microbatches=64,
        ))
        for dp in (1, 1024)
    )  # fmt: skip
    np.testing.assert_array_equal(few.order, many.order)
    assert (many.num_nodes, many.num_workers) == (8192, 8192)
    assert len(stages_of(disjoint(vision_dp=9, num_microbatches=1))) == 2
