"""Signals that ask a process to stop: SIGTERM, and SIGUSR1, which Slurm sends before a time limit if the job wants it.

A process blocks both, and one of its threads waits for them. The thread receives a signal at once, whatever the main
thread is waiting for, and learns who sent it. Processes that this process starts inherit the block, so a signal to all
of a job's processes ends none of them.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["STOP_SIGNALS", "SignalListener", "children_of", "stop_signals_blocked"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Seconds between two checks whether the parent process is gone.
_BETWEEN_LOOKS_S = 1.0


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Processes that are started inside this block have the signals blocked from the start, in all of their threads."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SignalListener(threading.Thread):
    """Calls `hear(signal, pid of the sender)` for every signal that asks this process to stop.

    Make it in the main thread before other threads start: only threads that start later inherit the block.
    """

    def __init__(self, hear: Callable[[signal.Signals, int], None], orphaned: Callable[[], None]) -> None:
        """`orphaned` is called when the process that started this one is gone."""
        super().__init__(daemon=True, name="signal-listener")
        self._hear, self._orphaned, self._parent = hear, orphaned, os.getppid()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def run(self) -> None:
        while True:
            heard = signal.sigtimedwait(STOP_SIGNALS, _BETWEEN_LOOKS_S)
            if heard is not None:
                self._hear(signal.Signals(heard.si_signo), heard.si_pid)
            elif os.getppid() != self._parent:
                self._orphaned()
                return


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, as /proc says."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The process's name stands before its parent, in brackets, and may itself hold brackets and spaces.
            parent = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue  # it has ended
        if int(parent) == pid:
            children.append(int(path.parent.name))
    return children
