"""Being asked to stop, and ending a rank.

A rank that gets a SIGTERM or a SIGUSR1 remembers it; all ranks learn of it in the sums that they exchange in every
step, and stop behind the same one. A SIGTERM of torchrun itself says that another rank has failed: it ends the rank at
once, and so does the end of torchrun.
"""

import multiprocessing
import os
import signal
from multiprocessing import resource_tracker

from dflop.runtime.signals import SignalListener

__all__ = ["StopRequest", "end_loaders"]


class StopRequest:
    """Whether this rank was asked to stop. To be made in the main thread before other threads are."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        resource_tracker.ensure_running()  # when it starts, it unblocks SIGTERM: loaders would inherit that
        self._listener = SignalListener(self._hear, _end_at_once)
        self._listener.start()

    def __bool__(self) -> bool:
        return self._signal is not None

    def _hear(self, number: signal.Signals, sender: int) -> None:
        if number == signal.SIGTERM and sender == os.getppid():
            _end_at_once()
        self._signal = number


def _end_at_once() -> None:
    """Whatever the main thread waits for, and with the loaders and the schedule service."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def end_loaders() -> None:
    """End what loaders are left. They do not hear the signal by which Python would end them when this process does, and
    wait for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's takes an ended loader for a failure
    for child in multiprocessing.active_children():
        child.kill()
