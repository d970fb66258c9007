"""Detecting ranks that hang: no step waits for a peer forever, and the ranks that hang are named.

A thread on every rank writes signs of life (heartbeats) to the process group's key-value store, with the place where
its main thread is. A rank whose task takes longer than allowed reads all signs twice. It then names the ranks whose
sign has not changed, or, if all have, those that do not wait for another rank. It kills the silent ranks that
its own torchrun has started, and ends itself, whatever its main thread waits for; torchrun ends the others. Where
torch's flight recorder has a file to write to, every rank writes it before.

With the first node its store ends. NCCL tells nobody: a rank that waits for a message would wait for an hour. So a rank
whose store is gone ends itself, too, unless it is about to end anyway.
"""

import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from dflop.base.signals import children_of

__all__ = ["PeerWatch", "longest_wait_s", "meeting"]

# The number of signs of life in one time-out.
_NUM_SIGNS = 20
_MOST_BETWEEN_S = 3.0
# How much longer than predicted, or than the longest one so far, a step may take.
_TIMES_LONGER = 5
# The key of the rank that has said why the job ends.
_SAID = "who said it"
# How the path of a rank's flight record begins, by the names of newer and of older versions of torch.
_RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")  # the second, where torch has no NCCL
# Functions in which a rank waits for others: the end of the file's path, and the beginning of the function's name.
_WAITS = (
    ("distributed_c10d.py", ""),
    ("step/run.py", "wait"),
    ("step/run.py", "end"),
    ("step/run.py", "spans"),
    ("step/run.py", "__init__"),
    ("feed.py", "get"),
    ("undecodable.py", "of"),
)
# Functions in which the host waits until the GPU has done what it was given, and so for other ranks.
_READS = (
    ("train/step_sums.py", "sum_over_ranks"),
    ("train/first_messages.py", "meet"),
    ("train/evaluation.py", "run"),
    ("train/trainer.py", "_peaks"),
    ("train/trainer.py", "_update"),
)
# On a GPU, these give work to it, and may stand in the middle of that until it has done what it has, or it waits.
_GIVES = (("train/node_work.py", "forward"), ("train/node_work.py", "backward"))
# Where a rank waits for its loaders, and how long it may while all ranks are alive: storage may stop for minutes.
_LOADS = (("train/node_work.py", "_next_loaded"),)
_LOADING, _LOADING_S = "loading its microbatch", 600.0
_OR_AT_ITS_GPU = ", or waiting for its GPU"
# How long a rank may take to end after the first node has.
_AFTER_STORE_S = 30.0
# How much later a rank ends that holds the interpreter while it waits to meet others.
_NO_INTERPRETER_S = 10.0
# How long a rank that ends the job waits for the others' flight records.
_RECORDS_S = 10.0


@contextlib.contextmanager
def meeting(limit_s: float) -> Iterator[None]:
    """A context in which ranks make their process groups. There is no watch yet, and NCCL waits for ever for a rank
    that it cannot reach: where this takes longer, the process says so, with the place of each thread, and ends."""

    def end() -> None:
        with contextlib.suppress(OSError):
            print(
                f"dflop: rank {os.environ.get('RANK')} on {socket.gethostname()} has not met the other ranks for "
                f"{limit_s:.0f} s. Do the nodes reach each other? NCCL_SOCKET_IFNAME="
                f"{os.environ.get('NCCL_SOCKET_IFNAME', '')} names the network interface, and NCCL_DEBUG=INFO says "
                "what NCCL tries. A longer `train.peer_timeout_s` gives them more time",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(file=sys.__stderr__)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    # The same by a thread that needs no interpreter, which the main thread may hold while it waits.
    faulthandler.dump_traceback_later(limit_s + _NO_INTERPRETER_S, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def longest_wait_s(timeout_s: float, predicted_s: float, longest_s: float) -> float:
    """How many seconds a step may take: the time-out, or a few times the predicted or the longest step if that is
    longer."""
    return max(timeout_s, _TIMES_LONGER * predicted_s, _TIMES_LONGER * longest_s)


class PeerWatch(threading.Thread):
    """One rank's thread. With `begin`, the main thread starts a task and ends the one before."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        carried: str,
        world_size: int,
        timeout_s: float,
        compiled: Callable[[], tuple[int, int]] = lambda: (0, 0),
        *,
        on_gpus: bool = False,
    ) -> None:
        """`carried` says in words which stages this rank carries. `compiled` counts how often compiling has begun and
        ended on this rank. With `on_gpus`, a host that reads from its GPU waits for others. Every rank must have
        constructed its watch before any of them calls `begin`."""
        super().__init__(daemon=True, name="peer-watch")
        self._store, self._rank, self._world_size = store.clone(), rank, world_size
        self._compiled, self._waits, self._gives = compiled, _WAITS + _READS * on_gpus, _GIVES * on_gpus
        self._about = {"carried": carried, "host": socket.gethostname(), "pid": os.getpid()}
        self._between_s = min(timeout_s / _NUM_SIGNS, _MOST_BETWEEN_S)
        self._main_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._what, self._began, self._limit_s, self._alive_s = "starting", time.monotonic(), None, math.inf
        self._closed = threading.Event()
        self._count, self._has_recorded = 0, False
        self._give_sign()

    def begin(self, what: str, limit_s: float | None = None, *, alive_s: float = 0.0) -> None:
        """Begin a task, described by `what`, that may take `limit_s` seconds (None: any time).

        If all ranks give signs of life, it may take `alive_s` seconds where that is longer, ten minutes while one of
        them waits for its loaders, and any time while one compiles, as it may at its first microbatch of a new kind.
        """
        with self._lock:
            self._what, self._began = what, time.monotonic()
            self._limit_s, self._alive_s = limit_s, alive_s

    def close(self) -> None:
        """End the thread. Call this before the process ends, which a thread that uses the store would abort."""
        self._closed.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        # Of the first look: when the task began, when this rank looked, and the signs that it read.
        first_look: tuple[float, float, list[dict]] | None = None
        woke = time.monotonic()
        try:
            while not self._closed.wait(self._between_s):
                with contextlib.suppress(OSError):  # a store in a folder, whose disk is full for a moment
                    self._give_sign()
                    if self._store.check([_SAID]):
                        self._record()
                now, last, woke = time.monotonic(), woke, time.monotonic()
                with self._lock:
                    if now - last > 3 * self._between_s + 1:
                        self._began = now  # this process was suspended, and maybe all were: give them time
                    what, began, limit_s, alive_s = self._what, self._began, self._limit_s, self._alive_s
                if limit_s is None or now < began + limit_s / 2:
                    first_look = None
                elif first_look is None or first_look[0] != began:
                    first_look = began, now, self._signs()
                elif now >= max(began + limit_s, first_look[1] + limit_s / 2):
                    self._judge(what, now - began, first_look[2], alive_s)
                    first_look = None
        except dist.DistError:
            if self._closed.wait(_AFTER_STORE_S):
                return
            with contextlib.suppress(OSError):
                print(
                    f"dflop: rank {self._rank} ({self._about['carried']}) ends, as the ranks' store, which the first "
                    "node keeps, is gone; see what that node says",
                    file=sys.stderr,
                    flush=True,
                )
            self._record()
            os._exit(1)

    def _give_sign(self) -> None:
        self._count += 1
        begun, ended = self._compiled()
        sign = self._about | {"count": self._count, "at": self._place()}
        sign |= {"what": getattr(self, "_what", "starting"), "graphs": begun, "is_compiling": begun > ended}
        self._store.set(f"alive/{self._rank}", json.dumps(sign))

    def _place(self) -> str:
        """Where the main thread is, in words: the innermost function of dflop or torch.distributed, and whether it
        waits. Without loader processes it loads by itself. The main thread waits in backward while a thread of
        autograd's runs it for a GPU."""
        frames = sys._current_frames()
        place = self._place_in(frames.pop(self._main_thread, None))
        if place.startswith("in backward"):
            others = (self._place_in(frame) for frame in frames.values() if not _is_python_thread(frame))
            place = next((other for other in others if other.startswith("waiting")), place)
        return place

    def _place_in(self, frame: FrameType | None) -> str:
        """Where a thread with this innermost frame is."""
        place, gives = "", False
        while frame is not None:
            path, function = frame.f_code.co_filename, frame.f_code.co_name
            if not place and any(path.endswith(end) and function.startswith(name) for end, name in self._waits):
                return f"waiting in {function}"
            if any(path.endswith(end) and function == name for end, name in _LOADS):
                return _LOADING
            if not place and "/dflop/" in path:
                place = f"in {function} of {os.path.basename(path)}"
            gives = gives or any(path.endswith(end) and function == name for end, name in self._gives)
            frame = frame.f_back
        return (place or "elsewhere") + _OR_AT_ITS_GPU * gives

    def _signs(self) -> list[dict]:
        return [json.loads(sign) for sign in self._store.multi_get([f"alive/{r}" for r in range(self._world_size)])]

    def _judge(self, what: str, seconds: float, before: list[dict], alive_s: float) -> None:
        """End this process if a rank is silent, or if the task may not take longer in any case."""
        now = self._signs()
        silent = [rank for rank, sign in enumerate(now) if sign["count"] == before[rank]["count"]]
        compiles = any(
            sign["is_compiling"] or sign["graphs"] > was["graphs"] for sign, was in zip(now, before, strict=True)
        )
        if any(sign["at"] == _LOADING for sign in (*before, *now)):
            alive_s = max(alive_s, _LOADING_S)
        if not silent and (compiles or seconds < alive_s):
            return
        busy = [rank for rank, sign in enumerate(now) if rank not in silent and not _may_wait(sign)]
        named = silent or busy
        if self._store.compare_set(_SAID, "", str(self._rank)) == str(self._rank).encode():
            why = "no sign of life came from: " if silent else "all are alive, but these do not wait for another rank: "
            told = "; ".join(f"rank {rank} ({_told(now[rank])})" for rank in named[:8])
            if not named:
                why = "all are alive and wait for each other" + ", or for their GPUs" * bool(self._gives)
            with contextlib.suppress(OSError):  # stderr may be closed already
                print(
                    f"dflop: {what} has not ended for {seconds:.0f} s (`train.peer_timeout_s`), and {why}{told}"
                    + ("; and more" if len(named) > 8 else ""),
                    file=sys.stderr,
                    flush=True,
                )
        # A connection that a killed rank breaks ends the others at once, so they record before.
        self._record()
        self._await_records([rank for rank in range(self._world_size) if rank not in silent])
        # torchrun would send SIGTERM first, and wait for half a minute before it kills a process that hangs. What the
        # store says is believed of processes that torchrun has started here alone.
        here = {now[rank]["pid"] for rank in silent if now[rank]["host"] == self._about["host"]}
        for pid in here.intersection(children_of(os.getppid())) - {os.getpid()}:
            with contextlib.suppress(OSError):  # another rank may have killed it already
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _record(self) -> None:
        """Once, write what torch's flight recorder holds of this rank. torch does so after its own, longer limit."""
        prefix = next(filter(None, map(os.environ.get, _RECORDS)), None)
        dump = next(filter(None, (getattr(_c10d, name, None) for name in _DUMPS)), None)
        if prefix and dump and not self._has_recorded:
            self._has_recorded = True
            with contextlib.suppress(OSError, RuntimeError):
                Path(f"{prefix}{self._rank}").write_bytes(dump())
            with contextlib.suppress(OSError, dist.DistError):
                self._store.set(f"recorded/{self._rank}", "")

    def _await_records(self, ranks: list[int]) -> None:
        until = time.monotonic() + _RECORDS_S
        with contextlib.suppress(dist.DistError):
            while self._has_recorded and time.monotonic() < until:
                if self._store.check([f"recorded/{rank}" for rank in ranks]):
                    return
                time.sleep(self._between_s)


def _may_wait(sign: dict) -> bool:
    """Whether a rank may wait for another one or its GPU, by the place in its last sign of life."""
    return sign["at"].startswith("waiting") or sign["at"].endswith(_OR_AT_ITS_GPU)


def _is_python_thread(frame: FrameType) -> bool:
    """Whether a thread with this innermost frame is one of `threading`'s; those of torch's own are not."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename == threading.__file__


def _told(sign: dict) -> str:
    return f"{sign['carried']}, process {sign['pid']} of {sign['host']}, last {sign['at']} at {sign['what']}"
