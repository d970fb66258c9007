"""What torch.compile does in this process: which functions it gave up, how long it took, and whether it works at all.

Layers that cannot be compiled run eager (`compilation.py`), and torch says so only in a log that nobody reads.
"""

import functools
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Compiled", "Stopwatch", "compiled_so_far", "keep_log", "why_not_compiled"]


@dataclass(kw_only=True, slots=True)
class Compiled:
    """What was compiled in this process since `keep_log`.

    - `num_begun`, `num_ended`: how often compiling has begun and ended; in between, it goes on.
    - `seconds`: how long it took in all.
    - `num_fallbacks`: functions that could not be compiled, and run eager.
    - `num_limits`: functions compiled so often that further variants run eager.
    - `reason`: why the last of these happened; None if none did.
    """

    num_begun: int = 0
    num_ended: int = 0
    seconds: float = 0.0
    num_fallbacks: int = 0
    num_limits: int = 0
    reason: str | None = None

    @property
    def num_eager(self) -> int:
        return self.num_fallbacks + self.num_limits


class Stopwatch:
    """Seconds since it was made, but for those that torch.compile took."""

    def __init__(self) -> None:
        self._began_s, self._compiled_s = time.monotonic(), _so_far.seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s - (_so_far.seconds - self._compiled_s)


_so_far = Compiled()
_began_s = 0.0


def compiled_so_far() -> Compiled:
    """What was compiled so far. The object changes as more is compiled, also while another thread looks at it."""
    return _so_far


def keep_log() -> None:
    """Have compiling noted from now on; calling it again changes nothing."""
    from torch._dynamo.callback import callback_handler  # it takes a second to import

    logger = logging.getLogger("torch._dynamo.convert_frame")
    if _listener not in logger.handlers:
        logger.addHandler(_listener)
    if _begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin)
        callback_handler.register_end_callback(_end)


def _begin(_: object) -> None:
    global _began_s
    _began_s = time.monotonic()
    _so_far.num_begun += 1


def _end(_: object) -> None:
    _so_far.num_ended += 1
    _so_far.seconds += time.monotonic() - _began_s


class _Listener(logging.Handler):
    """Hears of functions that torch gives up: it warns of each, and counts only how many it has compiled."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            _so_far.num_fallbacks += 1
            _so_far.reason = _line_of(record.exc_info[1])
        elif "recompile_limit" in (message := record.getMessage()):
            _so_far.num_limits += 1
            _so_far.reason = " ".join(message.split())[:200]


_listener = _Listener(logging.WARNING)


@functools.cache
def why_not_compiled(device: torch.device) -> str | None:
    """Why a small function cannot be compiled for this device; None if it can. It takes a few seconds, once."""
    # A number that no earlier process has used, so that torch compiles the function and does not find it on the disk.
    number = time.time_ns() % 2**40

    def small(values: torch.Tensor) -> torch.Tensor:
        return (values * number + 1.0).sin()

    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            torch.compile(small, fullgraph=True)(torch.ones(8, device=device))
    except Exception as error:  # of any part of the compiler, or of the programs that it calls
        return _line_of(error)
    return None


def _line_of(error: BaseException) -> str:
    """An error's kind and the first line of its text that says something, at most 200 characters."""
    cause: Any = error
    while (inner := getattr(cause, "inner_exception", None) or cause.__cause__) is not None:
        cause = inner
    line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {line}"[:200]
