"""What a rank may do for the first time in the middle of a step, beside a kernel that waits for a message."""

import time
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import triton
from triton import language as tl

__all__ = ["cycles_of", "waits_beside"]


def cycles_of(seconds: float) -> int:
    """The cycles for which a kernel sleeps so long."""
    tried = 10_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(tried)
    start.record()
    torch.cuda._sleep(tried)
    end.record()
    end.synchronize()
    return int(tried * seconds * 1000 / start.elapsed_time(end))


def waits_beside(cycles: int) -> Iterator[tuple[str, float]]:
    """What is done on another stream, and the seconds until it is, beside a kernel that sleeps for so many cycles."""
    (one, other, made), kept = torch.rand(3, 256, 256, device="cuda"), []
    stream = torch.cuda.Stream()
    _add_one.warmup(torch.float32, 256, grid=(1,))  # compiles it, and loads nothing
    firsts: dict[str, Callable[[], object]] = {
        "a kernel of torch": lambda: torch.atan2(one, other, out=made),
        "a product": lambda: torch.mm(one, other, out=made),
        "a kernel of Triton": lambda: _add_one[(1,)](made, 256),
        "a kernel that torch compiles": lambda: torch.erfinv(one, out=made),
        "memory of the device": lambda: kept.append(torch.empty(2**28, dtype=torch.uint8, device="cuda")),
        "pinned memory": lambda: kept.append(torch.empty(2**26, dtype=torch.uint8, pin_memory=True)),
        "a copy of pinned memory": lambda: kept.append(kept[-1].to("cuda", non_blocking=True)),
        "memory given back": lambda: (kept.clear(), torch.cuda.empty_cache()),
    }
    for name, first in firsts.items():
        yield name, _seconds(first, stream, cycles)
    with TemporaryDirectory() as folder:
        dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield "a sum over a group", _seconds(lambda: dist.all_reduce(made), stream, cycles)
        finally:
            dist.destroy_process_group()


def _seconds(first: Callable[[], object], stream: torch.cuda.Stream, cycles: int) -> float:
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    started = time.perf_counter()
    with torch.cuda.stream(stream):
        first()
        end = stream.record_event()
    end.synchronize()
    taken = time.perf_counter() - started
    torch.cuda.synchronize()
    return taken


@triton.jit
def _add_one(values, count: tl.constexpr):
    places = tl.arange(0, count)
    tl.store(values + places, tl.load(values + places) + 1)
