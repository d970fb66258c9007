"""Before training, every rank meets each rank that it will ever exchange a message with, once, and none waits."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dflop.plan import Grid, Plan
from dflop.step import Instruction, Op, Program, make_program
from dflop.step.routes import make_routes
from dflop.step.streams import unfinished
from dflop.train import first_messages
from dflop.train.first_messages import meet_groups, meet_peers, peers_by_channel
from dflop.train.groups import rank_groups
from dflop.train.topology import place_in_world


def plan_of(placement: str, world_size: int, pp: int = 2) -> Plan:
    first = world_size // 4 if placement == "disjoint" else 0
    llm = Grid(module="llm", num_ranks=world_size - first, pp=pp, rank_offset=first)
    return Plan(
        placement=placement,
        grids=(Grid(module="vision", num_ranks=first or world_size, tp=2), llm),
        num_microbatches=2,
    )


@pytest.fixture
def links_of(monkeypatch):
    """The links of a rank, and the messages of its meeting by channel: (whether it sends, peer)."""

    def make(plan: Plan, rank: int):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
        begun = []
        try:
            links = place_in_world(
                make_program(plan, rank=rank), torch.device("cpu"), torch.float32, dist.HashStore()
            ).links
            monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: begun.append(operations) or [])
            meet_peers(links)
        finally:
            dist.destroy_process_group()
        return links, [[(operation.op is dist.isend, operation.peer) for operation in own] for own in begun]

    return make


@pytest.mark.parametrize("placement", ["disjoint", "colocated"])
def test_both_ends_of_every_wire_meet_in_one_operation_of_their_channel(placement, links_of):
    plan, sent, received = plan_of(placement, 16), set(), set()
    for rank in range(16):
        links, begun = links_of(plan, rank)
        channels = list(peers_by_channel(links))
        assert channels == sorted(channels)
        assert len(begun) == len(channels)
        for channel, operations in zip(channels, begun, strict=True):
            assert len(set(operations)) == len(operations)
            sent |= {(channel, rank, peer) for is_send, peer in operations if is_send}
            received |= {(channel, peer, rank) for is_send, peer in operations if not is_send}
        for wire in (wire for wires in links.sends.values() for wire in wires):
            assert (wire.channel, rank, wire.peer) in sent
    assert sent == received


@pytest.mark.parametrize("placement", ["disjoint", "colocated"])
@pytest.mark.parametrize("world_size", [16, 128, pytest.param(1024, marks=pytest.mark.exhaustive)])
def test_a_rank_has_at_most_a_message_in_each_direction_for_each_rank_at_a_bridge(placement, world_size, links_of):
    """And one for each neighbour in the pipeline."""
    plan = plan_of(placement, world_size)
    num_at_bridge = plan.grids[0].num_ranks + plan.grid("llm").dp
    for rank in {0, plan.grid("llm").rank_offset, world_size - 1}:
        _, begun = links_of(plan, rank)
        assert len(begun) <= 8
        assert sum(map(len, begun)) <= 2 * num_at_bridge + 4


def meeting(program: Program) -> Program:
    """The program in which each worker sends and receives the first message of each edge, in one go."""
    routes, lists = make_routes(program.workers, program.edges), [[] for _ in program.workers]
    for number in range(len(program.edges)):
        for is_forward, (send, receive) in ((True, ("SEND_F", "RECV_F")), (False, ("SEND_B", "RECV_B"))):
            for route in routes.of(number, is_forward):
                first = Instruction(Op(send), 0, 0, number, 0)
                if first not in lists[route.sender]:
                    lists[route.sender].append(first)
                lists[route.receiver].append(Instruction(Op(receive), 0, 0, number, 0))
    return dataclasses.replace(program, instructions=tuple(map(tuple, lists)))


@pytest.mark.parametrize("placement", ["disjoint", "colocated"])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_the_meeting_ends_even_if_all_channels_share_a_queue(placement, pp):
    world_size = 24 if placement == "colocated" else 16
    program = meeting(make_program(plan_of(placement, world_size, pp)))
    assert any(program.instructions)
    assert unfinished(program, num_queues=1) == {}


GROUPED = {
    "replicas and tensor groups": plan_of("disjoint", 16),
    "an encoder over two stages": plan_of("colocated", 16),
    "chunks": Plan(
        placement="colocated",
        grids=(Grid(module="vision", num_ranks=8), Grid(module="llm", num_ranks=8, pp=2)),
        num_microbatches=4,
        schedule="interleaved_1f1b",
        num_chunks=2,
    ),
    "shared samples and parameters": Plan(
        placement="colocated",
        grids=(
            Grid(module="vision", num_ranks=8, sharding="parameters"),
            Grid(module="llm", num_ranks=8, tp=2, cp=2),
        ),
        num_microbatches=2,
    ),
}


@pytest.mark.parametrize("plan", GROUPED.values(), ids=GROUPED)
def test_all_ranks_of_a_group_meet_in_it_and_none_waits_in_a_circle(plan, monkeypatch):
    """Each collective waits for all of its group's ranks."""
    lists = [meetings_of(plan, rank, monkeypatch) for rank in range(plan.world_size)]
    sharing = {grid.module for grid in plan.grids if grid.gathers}  # warming up gathers and sums in their groups
    for (purpose, module), groups in rank_groups(make_program(plan)).items():
        if not (purpose in ("shards", "copies") or (purpose == "replicas" and module in sharing)):
            met = {ranks for name, ranks in lists[groups[0][0]] if name in COLLECTIVES[purpose]}
            assert set(groups) & met, (purpose, module)
    left = [list(own) for own in lists]
    while waiting := [own[0] for own in left if own]:
        ready = {meeting for meeting in waiting if all(left[rank][:1] == [meeting] for rank in meeting[1])}
        assert ready, waiting
        left = [own[1:] if own and own[0] in ready else own for own in left]


COLLECTIVES = {
    "tensor": ["all_reduce"],
    "replicas": ["reduce_scatter_flat", "all_gather_flat"],
    "samples": ["all_to_all_single"],
    "ends": ["reduce", "broadcast"],
}


def meetings_of(plan: Plan, rank: int, monkeypatch) -> list[tuple[str, tuple[int, ...]]]:
    """The collectives of a rank's meetings: their names and the ranks that take part."""
    begun = []
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)

    def noted(name: str, group: dist.ProcessGroup | None = None) -> None:
        begun.append((name, tuple(dist.get_process_group_ranks(group or dist.group.WORLD))))

    class Done:
        def wait(self) -> None:
            pass

    try:
        topology = place_in_world(
            make_program(plan, rank=rank), torch.device("cpu"), torch.float32, dist.HashStore(), is_tied=True
        )
        for name in ("all_reduce", "all_to_all_single", "reduce", "broadcast"):
            monkeypatch.setattr(dist, name, lambda *_, name=name, group=None, **__: noted(name, group))
        for name in ("reduce_scatter_flat", "all_gather_flat"):
            monkeypatch.setattr(first_messages, name, lambda _, __, group, name=name: noted(name, group) or Done())
        meet_groups(topology)
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    return begun
