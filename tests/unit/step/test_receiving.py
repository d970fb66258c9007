"""Slots of a GPU: a message is copied out before its memory is used again, and no receive waits for computations."""

import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dflop.step import Instruction, Op
from dflop.step.receiving import Slots
from dflop.step.routes import Edge
from dflop.step.run import Links, Wire, run_instructions


class RecordedStreams:
    """Events are numbers of computations that the compute stream was given."""

    def __init__(self):
        self.num_computed, self.waited_for, self.channels = 0, [], []

    def computed(self):
        return self.num_computed

    @contextmanager
    def behind(self, events, channel):
        self.waited_for.append(events)
        self.channels.append(channel)
        yield


def receive(slots: Slots, value: float, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Begin to receive messages that come at once."""
    buffers = slots.buffers(0, shapes)
    with slots.issuing(0, []):
        for buffer in buffers:
            buffer.fill_(value)
    return buffers


def make() -> tuple[Slots, RecordedStreams]:
    streams = RecordedStreams()
    return Slots(torch.device("cpu"), torch.float32, streams), streams


def test_a_message_is_whole_however_many_come_before_it_is_taken():
    slots, _ = make()
    begun = [receive(slots, value, (value, 2), (1, 2)) for value in range(1, 6)]
    for value, buffers in enumerate(begun, 1):
        first, second = (slots.take(buffer) for buffer in buffers)
        assert torch.equal(first, torch.full((value, 2), float(value)))
        assert torch.equal(second, torch.full((1, 2), float(value)))


def test_memory_is_used_again_and_a_receive_waits_for_the_copy_out_of_it_alone():
    slots, streams = make()
    addresses = []
    for step in range(6):
        (buffer,) = receive(slots, step, (4, 2))
        addresses.append(buffer.data_ptr())
        streams.num_computed += 10  # what the compute stream is given while the message comes
        slots.take(buffer)
    assert len(set(addresses)) == 2
    assert streams.waited_for == [[0], [10], [10], [20], [30], [40]]


def test_a_channel_waits_for_its_own_slots_alone():
    slots, streams = make()
    for channel in (3, 5, 3):
        (buffer,) = slots.buffers(channel, [(1, 2)])
        with slots.issuing(channel, []):
            slots.take(buffer)
    assert streams.channels == [3, 5, 3]


def test_a_larger_message_gets_larger_memory():
    slots, _ = make()
    for size in (1, 1, 5, 5, 2):
        (buffer,) = receive(slots, size, (size, 2))
        assert torch.equal(slots.take(buffer), torch.full((size, 2), float(size)))


def test_empty_messages_are_told_apart():
    slots, _ = make()
    buffers = [buffer for value in range(2) for buffer in receive(slots, value, (0, 2), (value + 1, 2), (0, 2))]
    assert [slots.take(buffer).shape for buffer in buffers] == [(0, 2), (1, 2), (0, 2), (0, 2), (2, 2), (0, 2)]


def test_an_operation_waits_for_what_made_its_messages_and_for_its_slot_and_nothing_later():
    slots, streams = make()
    made = []
    for _ in range(2):
        streams.num_computed += 1
        made.append(slots.made())
    streams.num_computed += 10  # what the sender computes until its receiver has come as far
    slots.buffers(0, [(2, 2)])
    streams.num_computed += 1
    for sent in (made, made[:1]):  # the second operation receives nothing
        with slots.issuing(0, sent):
            pass
    assert streams.waited_for == [[1, 2, 12], [1]]


class Encoder:
    """Features of two values, with each forward an event."""

    def __init__(self, streams: RecordedStreams) -> None:
        self.streams = streams

    def edge_shape(self, microbatch, edge):
        return (2,)

    def prepare(self, microbatch): ...

    def forward(self, microbatch, received):
        self.streams.num_computed += 1
        return {0: torch.zeros(2)}


def send_in(order: list[str], slots: Slots, work: Encoder, track: int = 0) -> None:
    """Carry out forwards (F0), sends of their features (S0), backwards (B0) and sends of their gradients (G0), over an
    edge of this track; 0 is a bridge."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        links = Links(
            edges=(Edge(0, 1, track),),
            sends=dict.fromkeys([(0, True), (0, False)], (Wire(1, 0, dist.group.WORLD),)),
            receives={},
            inner=(),
            shared=(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            receiver=slots,
        )
        instructions = []
        for place, (kind, number) in enumerate(order):
            op = {"F": Op.FORWARD, "S": Op.SEND_FORWARD, "B": Op.BACKWARD, "G": Op.SEND_BACKWARD}[kind]
            instructions.append(Instruction(op, 0, int(number), 0 if op.is_send else -1, place))
        run_instructions(instructions, {0: work}, links)
    finally:
        dist.destroy_process_group()


def test_features_that_are_sent_later_do_not_wait_for_what_their_sender_has_computed_since():
    slots, streams = make()
    send_in(["F0", "F1", "F2", "S0", "S1"], slots, Encoder(streams))
    assert streams.waited_for == [[1], [2]]


class Watched(Encoder):
    """Notes how many of its features or gradients have memory when it computes."""

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__(streams)
        self.made, self.num_held = [], []

    def forward(self, microbatch, received):
        self.num_held.append(sum(tensor() is not None for tensor in self.made))
        made = super().forward(microbatch, received)
        self.made.append(weakref.ref(made[0]))
        return made

    def backward(self, microbatch, received):
        return self.forward(microbatch, received)


def test_features_of_a_node_without_backward_keep_their_memory_during_four_more_forwards():
    """The host, which is ahead of the GPU, sees no message arrive."""
    slots, streams = make()
    encoder = Watched(streams)
    send_in([own for number in range(8) for own in (f"F{number}", f"S{number}")], slots, encoder)
    assert encoder.num_held == [0, 1, 2, 3, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("track", "num_held"),
    [
        pytest.param(1, [0, 1, 1, 1, 1, 1, 1, 1], id="hidden states, during one more backward"),
        pytest.param(0, [0, 1, 2, 3, 4, 4, 4, 4], id="features, during four more backwards"),
    ],
)
def test_a_gradient_that_was_sent_keeps_its_memory(track, num_held):
    slots, streams = make()
    stage = Watched(streams)
    send_in([own for number in range(8) for own in (f"B{number}", f"G{number}")], slots, stage, track)
    assert stage.num_held == num_held
