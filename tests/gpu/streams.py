"""Whether streams run beside each other, and whether the first use of a kernel waits for others.

CUDA reads its settings when a process begins to use it, so each setting is tried in a process of its own.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from tests.gpu.check import Figures, Setting, Skipped

__all__ = ["side_by_side"]

_SLEEP_S = 0.02
_NUM_STREAMS = (4, 8, 16, 32, 64)
# With training's settings (`dflop/base/gpu_environment.py`), and with CUDA's own.
_SETTINGS = {
    "training's settings": {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"},
    "CUDA's settings": {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "LAZY"},
}


def side_by_side(setting: Setting) -> Iterator[Figures]:
    """Streams that sleep at the same time, of so many; streams that are held up by one that waits for an event; and
    seconds of what is done for the first time while a kernel sleeps for half a second."""
    if setting.device != "cuda":
        raise Skipped("a CPU has no streams")
    for name, variables in _SETTINGS.items():
        command = [sys.executable, "-c", "from tests.gpu.streams import _measure; _measure()"]
        with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                yield {f"{figure}, {name}": value for figure, value in json.loads(line).items()}
        if process.returncode:
            raise RuntimeError(f"with {name} it ended with exit code {process.returncode}")


def _measure() -> None:
    """Print the figures of this process's settings, a line of JSON as soon as one is found."""
    from tests.gpu.first_uses import cycles_of, waits_beside  # needs Triton, which torch for CPUs lacks

    def found(name: str, value: float) -> None:
        print(json.dumps({name: value}), flush=True)

    started = time.perf_counter()
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    found("seconds until a process's first kernel has run", time.perf_counter() - started)
    free, total = torch.cuda.mem_get_info()
    found("bytes of a process's first kernel", total - free)
    cycles = cycles_of(_SLEEP_S)
    for count in _NUM_STREAMS:
        found(f"asleep at the same time of {count}", _num_asleep(count, cycles))
    found("held up by a stream that waits, of 16", _num_held_up(16, cycles))
    for name, seconds in waits_beside(25 * cycles):
        found(f"seconds until the first of {name}", seconds)


def _num_asleep(count: int, cycles: int) -> float:
    """Seconds of sleep of all streams together, beside what passed."""
    streams = [torch.cuda.Stream() for _ in range(count)]
    torch.cuda.synchronize()
    started = time.perf_counter()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return count * _SLEEP_S / (time.perf_counter() - started)


def _num_held_up(count: int, cycles: int) -> int:
    """One stream sleeps for long and another waits for it. Of `count` others, those that do not end before it wakes."""
    sleeping, waiting, *others = [torch.cuda.Stream() for _ in range(2 + count)]
    # All memory is there before: to ask the driver for some would wait for what runs.
    first, *values = [torch.zeros(1, device="cuda") for _ in range(1 + count)]
    torch.cuda.synchronize()
    with torch.cuda.stream(sleeping):
        torch.cuda._sleep(10 * cycles)
        woken = sleeping.record_event()
    waiting.wait_event(woken)
    with torch.cuda.stream(waiting):
        first.add_(1)
    ends = []
    for stream, value in zip(others, values, strict=True):
        with torch.cuda.stream(stream):
            value.add_(1)
            ends.append(stream.record_event())
    while not woken.query() and not all(end.query() for end in ends):
        time.sleep(0.001)
    held_up = sum(not end.query() for end in ends)
    torch.cuda.synchronize()
    return held_up
