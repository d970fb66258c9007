"""One training a folder: a lock that names who holds it.

The lock is the kernel's, and ends with the process that holds it, however that ends. How far it reaches over a network
is the file system's affair. This file does not import torch.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dflop.base import UserError, printable

__all__ = ["sole_use"]


@contextlib.contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Hold the lock `folder`/.lock while the block runs.

    Prints a warning where the file system has no locks, and where a training on another machine has left no word of its
    end.

    Raises:
        UserError: when another process holds the lock.
    """
    path, host, has_locks = folder / ".lock", socket.gethostname(), True
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _, who, how = _told(file.read())
            raise UserError(
                f"{folder}: {who} trains here; wait for its end, or end it{how}. If its machine is gone for good, "
                f"delete {path}"
            ) from None
        except OSError as error:
            has_locks = False
            _warn(f"{path}: {error.strerror}: nothing keeps a second training out of this folder")
        if left := file.read():
            where, who, how = _told(left)
            if where != host or not has_locks:  # of this host, the kernel knows that it has ended
                _warn(f"{folder}: {who} has left no word of its end; if it still trains here, end it{how}")
        about = {"host": host, "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID")}
        file.truncate(0)
        file.write(json.dumps(about | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _told(written: str) -> tuple[str, str, str]:
    """The host of who has written into the lock, who that is, and how to end it."""
    try:
        host, pid, job, since = (json.loads(written)[name] for name in ("host", "pid", "job", "since"))
    except (ValueError, LookupError, TypeError):
        return "", "another process", ""
    if job:
        return host, f"process {pid} of {host} (Slurm job {job}, since {since})", f" (`scancel {job}`)"
    return host, f"process {pid} of {host} (since {since})", f" (`kill {pid}` there)"


def _warn(text: str) -> None:
    print(printable(f"dflop: warning: {text}"), file=sys.stderr, flush=True)
