"""AdamW with its state in host memory: the values of the plain one, and copies in an order that GPUs may take."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dflop.plan import leaving
from dflop.train import offloaded_adamw
from dflop.train.adamw import MOMENTS, AdamW, Rates
from dflop.train.host_buffer import host_zeros
from dflop.train.offloaded_adamw import OffloadedAdamW, make_adamw

CPU, RATES = torch.device("cpu"), (Rates(1.0, 0.1), Rates(3.0, 0.0, (0.8, 0.95), 1e-3))
NUM_VALUES = 1000, 300, 7, 64


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(leaving, "_MOST_VALUES", 256)


def tensors(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=generator, dtype=dtype)) for size in NUM_VALUES]


@pytest.mark.parametrize("has_masters", [False, True])
def test_values_are_those_of_adamw_to_the_last_digit(has_masters):
    plain, away = tensors(torch.float32), tensors(torch.float32)
    optimizers = [
        make_adamw(
            dict(zip(own, itertools.cycle(RATES), strict=False)), CPU, offloads=offloads, has_masters=has_masters
        )
        for own, offloads in ((plain, False), (away, True))
    ]
    assert [type(own) for own in optimizers] == [AdamW, OffloadedAdamW]
    optimizers[1].go_on_from(0)
    narrow = [torch.zeros(size, dtype=torch.bfloat16) for size in NUM_VALUES]
    for step in range(3):
        gradients = [torch.randn(size, generator=torch.Generator().manual_seed(step)) for size in NUM_VALUES]
        for own, optimizer in zip((plain, away), optimizers, strict=True):
            computed = dict(zip(own, narrow, strict=True)) if has_masters else {}
            optimizer.step(0.01, {it: grad.clone() for it, grad in zip(own, gradients, strict=True)}, computed)
    for one, other, values in zip(plain, away, narrow, strict=True):
        assert torch.equal(one, other)
        assert not has_masters or torch.equal(values, other.bfloat16())
        moments = [optimizer.moments_of(own) for optimizer, own in zip(optimizers, (one, other), strict=True)]
        assert all(torch.equal(moments[0][name], moments[1][name]) for name in MOMENTS)


def test_two_parts_are_on_the_device():
    optimizer = OffloadedAdamW(dict.fromkeys(tensors(torch.float64), RATES[0]), CPU, has_masters=True)
    assert sum(own.nbytes for own in optimizer.on_device) == 2 * 256 * 3 * 8
    assert int(leaving.values_of_part(300)) == 192  # of few values, no more than there are


def test_memory_of_the_host_is_zeros_and_does_not_count_where_tensors_are_fake():
    assert host_zeros(5, torch.ones(1, dtype=torch.float64)).equal(torch.zeros(5, dtype=torch.float64))
    assert host_zeros(0, torch.ones(1)).numel() == 0
    with FakeTensorMode():
        assert host_zeros(5, torch.ones(1)).device.type == "meta"


class Clocked:
    """A stream, or an event. `happened` are the numbers of the operations that have ended before the stream's next one
    begins: those given to the stream itself, and those of streams that it waited for."""

    def __init__(self, *_: object, **__: object) -> None:
        self.happened: set[int] = set()

    def record(self, stream: "Clocked") -> None:
        self.happened = set(stream.happened)

    def wait_event(self, event: "Clocked") -> None:
        self.happened |= event.happened

    wait_stream = wait_event


class Races(TorchDispatchMode):
    """Collects pairs of operations that touch the same memory, of which one writes, in no order."""

    def __init__(self, streams: list[Clocked]) -> None:
        super().__init__()
        self.streams, self.touched, self.races, self.num_copies = streams, [], [], 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        writes = [own.alias_info is not None and own.alias_info.is_write for own in operation._schema.arguments]
        if any(writes):
            number, stream = len(self.touched), self.streams[-1]
            touched = {}
            for is_written, own in zip(writes, args, strict=False):
                for tensor in own if isinstance(own, list | tuple) else [own]:
                    if isinstance(tensor, torch.Tensor):
                        size = tensor.element_size()
                        start = tensor.storage_offset() * size
                        key = tensor.untyped_storage()._cdata, start, start + tensor.numel() * size
                        touched[key] = touched.get(key, False) or is_written
            for other, before in enumerate(self.touched):
                if other not in stream.happened and _conflict(touched, before[1]):
                    self.races.append((before[0], str(operation)))
            self.touched.append((str(operation), touched))
            stream.happened.add(number)
            self.num_copies += operation is torch.ops.aten.copy_.default
        return operation(*args, **(kwargs or {}))


def _conflict(one: dict, other: dict) -> bool:
    return any(
        mine[0] == theirs[0] and mine[1] < theirs[2] and theirs[1] < mine[2] and (one[mine] or other[theirs])
        for mine in one
        for theirs in other
    )


@pytest.mark.parametrize("left_out", [None, "came", "went", "update"])
@pytest.mark.parametrize("has_masters", [False, True])
def test_streams_wait_for_each_other_where_they_touch_the_same_memory(has_masters, left_out, monkeypatch):
    """And the check sees it where they do not: one of the waits is left out."""
    computing = Clocked()
    streams = [computing]

    @contextmanager
    def on(stream):
        streams.append(stream)
        yield
        streams.pop()

    for name, stand_in in {"Event": Clocked, "current_stream": lambda _: computing, "stream": on}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(offloaded_adamw, "_streams", lambda _: (Clocked(), Clocked()))
    if left_out == "update":
        monkeypatch.setattr(Clocked, "wait_stream", lambda *_: None)
    elif left_out:
        after = offloaded_adamw._Slot.after
        monkeypatch.setattr(
            offloaded_adamw._Slot, "after", lambda slot, name, *own: name == left_out or after(slot, name, *own)
        )
    with Races(streams) as races:
        parameters = tensors(torch.float32)
        optimizer = OffloadedAdamW(dict.fromkeys(parameters, RATES[0]), CPU, has_masters=has_masters)
        gradients = {own: torch.zeros_like(own) for own in parameters}
        narrow = {own: own.detach().bfloat16() for own in parameters}
        for _ in range(2):
            optimizer.step(0.01, gradients, narrow if has_masters else {})
    assert races.num_copies > 2 * 2 * sum(-(-size // 256) for size in NUM_VALUES)
    assert bool(races.races) == bool(left_out), races.races[:3]
