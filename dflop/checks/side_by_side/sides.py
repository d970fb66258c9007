"""Sides, which are ways to train that take turns, and the clock that times them."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from dflop.base.signals import children_of

__all__ = ["Side", "paused", "timed"]

# With loaders that read ahead, a turn has this number of steps.
_RUN = 6


@dataclass
class Side:
    """One way to train: `train` takes the result of `load(step)`. `loaders` are the process ids of the loaders that
    read ahead for it."""

    load: Callable[[int], object]
    train: Callable[[object], None]
    loaders: list[int] = field(default_factory=list)

    def pause(self) -> None:
        self._tell(signal.SIGSTOP)

    def go_on(self) -> None:
        self._tell(signal.SIGCONT)

    def _tell(self, number: signal.Signals) -> None:
        for process in self.loaders:
            os.kill(process, number)


def paused(make: Callable[[], Side]) -> Side:
    """Make a side, and pause its loaders until its turn. Its loaders are the processes that `make` starts."""
    before = set(children_of(os.getpid()))
    side = make()
    started = [child for child in children_of(os.getpid()) if child not in before]
    side.loaders = [child for child in started if not _is_resource_tracker(child)]
    side.pause()
    return side


def _is_resource_tracker(process: int) -> bool:
    """Whether a child process is Python's resource tracker, for which others wait, so that it must not be paused."""
    return b"resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()


def timed(
    sides: Mapping[str, Side],
    num_steps: int,
    device: torch.device,
    *,
    on_the_fly: bool,
    progress: Callable[[], object],
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """For each side, the wall seconds of each step, and the CPU seconds of the busiest rank; every rank must call this.

    Batches are loaded before a step's clock starts, or with `on_the_fly` by the sides' loaders, which read ahead; turns
    then have several steps. `progress` is called after each step.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()  # as in the trainer, for all sides
    length = _RUN if on_the_fly else 1
    for name, step in _turns(list(sides), num_steps, length):
        side = sides[name]
        loaded = None if on_the_fly else side.load(step)
        _meet(device)
        if step % length == 0:
            side.go_on()
        started, cpu_started = time.monotonic(), time.process_time()
        side.train(side.load(step) if on_the_fly else loaded)
        cpu = torch.tensor(time.process_time() - cpu_started, device=device)
        _meet(device)
        seconds[name].append(time.monotonic() - started)
        if step % length == length - 1:
            side.pause()
        dist.all_reduce(cpu, dist.ReduceOp.MAX)
        cpu_seconds[name].append(float(cpu))
        progress()
    return seconds, cpu_seconds


def _turns(names: Sequence[str], num_steps: int, length: int) -> Iterator[tuple[str, int]]:
    """The steps of all sides in the order of their turns, of `length` steps each. Each side begins a round in its turn,
    so that none always finds the caches and the allocator as the same other side left them."""
    for number, first in enumerate(range(0, num_steps, length)):
        begins = number % len(names)
        for name in [*names[begins:], *names[:begins]]:
            for step in range(first, min(first + length, num_steps)):
                yield name, step


def _meet(device: torch.device) -> None:
    """Wait until all ranks, and their devices, have come this far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
