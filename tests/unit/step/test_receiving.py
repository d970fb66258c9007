"""Slots of a GPU: a message is copied out before its memory is used again, and no receive waits for computations."""

from contextlib import contextmanager

import torch

from dflop.step.receiving import Slots


class RecordedStreams:
    """Events are numbers of computations that the compute stream was given."""

    def __init__(self):
        self.num_computed, self.waited_for, self.channels = 0, [], []

    def computed(self):
        return self.num_computed

    @contextmanager
    def behind(self, event, channel):
        self.waited_for.append(event)
        self.channels.append(channel)
        yield


def receive(slots: Slots, value: float, *shapes: tuple[int, ...], has_sends: bool = False) -> list[torch.Tensor]:
    """Begin to receive messages that come at once."""
    buffers = slots.buffers(0, shapes)
    with slots.issuing(has_sends=has_sends):
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
    assert streams.waited_for == [0, 10, 10, 20, 30, 40]


def test_a_channel_waits_for_its_own_slots_alone():
    slots, streams = make()
    for channel in (3, 5, 3):
        (buffer,) = slots.buffers(channel, [(1, 2)])
        with slots.issuing(has_sends=False):
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


def test_an_operation_that_also_sends_waits_for_the_computation_that_made_what_is_sent():
    slots, streams = make()
    receive(slots, 1.0, (2, 2), has_sends=True)
    assert streams.waited_for == []
