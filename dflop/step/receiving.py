"""Where messages are received, and when they begin: on a CPU in fresh tensors and at once, on a GPU in slots of buffers
that are used again, and beside what is computed.

On a GPU the memory of a fresh tensor is free only behind what the compute stream was given before, so a message into it
would wait for that. A slot is free as soon as its last message was copied out. The host is ahead of the GPU: it begins
to receive into slots long before a message is needed, and messages come in while the GPU computes. A copy out of a slot
takes about a hundredth of the time of its message. A channel has a slot for each operation that is under way, and one
more at most. What is sent waits for the computation that made it, and for no later one: features may be sent only when
their receiver has come further, and their sender has computed other things since. Before memory of what was sent is
used again (`run`), the compute stream waits until it has arrived: the host, which is ahead, would see too late that it
has.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["CudaStreams", "FreshTensors", "NoStreams", "Receiver", "Slots", "receiver_on"]


class Receiver(Protocol):
    """Memory for the messages of a rank, and what an operation waits for before it begins."""

    def buffers(self, channel: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """A buffer for each message that one operation of a channel receives."""

    def made(self) -> torch.cuda.Event | None:
        """The event behind which all that was computed so far is there. A later send of it waits for this event."""

    def issuing(self, channel: int, sent: Sequence[torch.cuda.Event | None]) -> AbstractContextManager[None]:
        """A context in which to begin an operation. It waits until all that it sends is made (`sent`), and the last
        buffers, if they are of this operation, are free; for nothing else that is computed."""

    def take(self, buffer: torch.Tensor) -> torch.Tensor:
        """The message that came into a buffer, once the compute stream waits for it. The buffer is used again."""

    def lets_go(self, sent: dist.Work) -> bool:
        """Whether the memory of what was sent, and need not be kept any more, may be used again."""


class FreshTensors:
    """A new tensor for each message."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._how = {"device": device, "dtype": dtype}

    def buffers(self, channel: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return [torch.empty(shape, **self._how) for shape in shapes]

    def made(self) -> None:
        return None

    def issuing(self, channel: int, sent: Sequence[None]) -> AbstractContextManager[None]:
        return nullcontext()

    def take(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    def lets_go(self, sent: dist.Work) -> bool:
        return sent.is_completed()


@dataclass(slots=True)
class _Slot:
    """Memory for the messages of one operation, free from an event of the compute stream on."""

    memory: torch.Tensor
    free_from: torch.cuda.Event | None
    num_left: int = 0  # messages that were not copied out yet


class Streams(Protocol):
    """Where operations wait."""

    def computed(self) -> torch.cuda.Event | None:
        """The end of what the compute stream was given so far."""

    def behind(self, events: Sequence[torch.cuda.Event | None], channel: int) -> AbstractContextManager[None]:
        """A context in which the channel's operations wait for these events, and for earlier ones of the channel."""


class CudaStreams:
    """Streams behind which messages begin, one a channel, and events of the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_channel: dict[int, torch.cuda.Stream] = {}

    def computed(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def behind(self, events: Sequence[torch.cuda.Event], channel: int) -> Iterator[None]:
        if channel not in self._of_channel:
            self._of_channel[channel] = torch.cuda.Stream(self._device)
        for event in events:
            self._of_channel[channel].wait_event(event)
        with torch.cuda.stream(self._of_channel[channel]):
            yield


class NoStreams:
    """Streams of a device without any, to see which memory slots take."""

    def computed(self) -> None:
        return None

    def behind(self, events: Sequence[None], channel: int) -> AbstractContextManager[None]:
        return nullcontext()


class Slots:
    """Buffers that are used again, on a GPU. They are kept from step to step."""

    def __init__(self, device: torch.device, dtype: torch.dtype, streams: Streams | None = None) -> None:
        self._how, self._streams = {"device": device, "dtype": dtype}, streams or CudaStreams(device)
        self._free: dict[int, deque[_Slot]] = defaultdict(deque)
        self._num_slots: Counter[int] = Counter()
        # By the buffer's identity: empty messages have no address of their own.
        self._slot_of: dict[int, tuple[int, _Slot]] = {}
        self._last: _Slot | None = None

    def buffers(self, channel: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        sizes = [prod(shape) for shape in shapes]
        slot = self._slot(channel, sum(sizes))
        slot.num_left, self._last = len(shapes), slot
        parts = slot.memory[: sum(sizes)].split(sizes)
        found = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._slot_of |= {id(buffer): (channel, slot) for buffer in found}
        return found

    def _slot(self, channel: int, size: int) -> _Slot:
        """The slot that was free first. A channel has two at least, so that one message comes while another is
        copied."""
        if self._free[channel] and self._num_slots[channel] > 1:
            slot = self._free[channel].popleft()
            if slot.memory.numel() >= size:
                return slot
        else:
            self._num_slots[channel] += 1
        return _Slot(torch.empty(size, **self._how), self._streams.computed())

    def made(self) -> torch.cuda.Event | None:
        return self._streams.computed()

    def issuing(self, channel: int, sent: Sequence[torch.cuda.Event | None]) -> AbstractContextManager[None]:
        slot, self._last = self._last, None
        return self._streams.behind([*sent, *([slot.free_from] if slot else [])], channel)

    def take(self, buffer: torch.Tensor) -> torch.Tensor:
        channel, slot = self._slot_of.pop(id(buffer))
        message = buffer.clone()
        slot.num_left -= 1
        if not slot.num_left:
            slot.free_from = self._streams.computed()
            self._free[channel].append(slot)
        return message

    def lets_go(self, sent: dist.Work) -> bool:
        sent.wait()
        return True


def receiver_on(device: torch.device, dtype: torch.dtype) -> Receiver:
    """Where a rank on this device receives."""
    return (FreshTensors if device.type == "cpu" else Slots)(device, dtype)
