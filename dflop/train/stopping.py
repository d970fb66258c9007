"""Stop requests, and how a rank ends.

A rank that gets a SIGTERM or a SIGUSR1 remembers it. All ranks learn of it in the sums that they exchange in every
step, and stop after the same step. A SIGTERM from torchrun itself means that another rank has failed: it ends the rank
at once, and so does the end of torchrun.
"""

import multiprocessing
import os
import signal
from multiprocessing import resource_tracker

from dflop.base.signals import SignalListener

__all__ = ["StopRequest", "end_loaders"]


class StopRequest:
    """Whether this rank was asked to stop. It must be constructed in the main thread, before other threads start."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        resource_tracker.ensure_running()  # its start unblocks SIGTERM, which later loaders would otherwise inherit
        self._listener = SignalListener(self._hear, _end_at_once)
        self._listener.start()

    def __bool__(self) -> bool:
        return self._signal is not None

    def _hear(self, number: signal.Signals, sender: int) -> None:
        if number == signal.SIGTERM and sender == os.getppid():
            _end_at_once()
        self._signal = number


def _end_at_once() -> None:
    """End this process, whatever its main thread waits for, with its loaders and its schedule service."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def end_loaders() -> None:
    """Kill the loaders that are left. At its end, Python would send them SIGTERM, which is blocked in them, and wait
    for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes a killed loader for a failure
    for child in multiprocessing.active_children():
        child.kill()
