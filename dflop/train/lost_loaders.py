"""Errors of loader processes in one line: bad samples, and processes that die or cannot hand over what they loaded.

A loader hands tensors over in shared memory, as open files. Both are scarce in containers.
"""

import errno
import os
import resource
import shutil
import sys
import time
import traceback
from multiprocessing.queues import Queue

from dflop.base import UserError

__all__ = ["allow_open_files", "end_if_not_handed_over", "in_one_line", "why_loading_ended"]

_OPEN_FILES = 65_536
_NOTICED_S = 2.0


def allow_open_files() -> None:
    """Raise this process's limit of open files, which its loaders inherit, as far as the machine lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _OPEN_FILES)), hard))


def end_if_not_handed_over() -> None:
    """Have this loader process end if it cannot hand over a microbatch. Otherwise it would leave the microbatch out,
    and its rank would wait for ever."""
    Queue._on_queue_feeder_error = staticmethod(_end)


def _end(error: Exception, _: object) -> None:
    """End with the number of the operating system's error as exit code."""
    known = [number for number in (errno.ENOSPC, errno.EMFILE) if os.strerror(number) in str(error)]
    if not known:
        traceback.print_exception(error)
        sys.stderr.flush()
    os._exit(known[0] if known else 1)


def in_one_line(error: UserError) -> str:
    """The message alone. If a loader raised the error, torch has put a traceback before it."""
    return str(error).rsplit(f"{UserError.__name__}: ", 1)[-1].strip()


def why_loading_ended(error: BaseException) -> str | None:
    """One line on lost loader processes, from the error that torch raises in their rank; None for another error."""
    if isinstance(error, (ConnectionError, EOFError)):  # perhaps a loader died while it handed something over
        try:
            time.sleep(_NOTICED_S)
        except RuntimeError as later:  # which torch raises in the main thread as soon as it notices
            error = later
    said = f"{error} {error.__cause__}"
    if "DataLoader worker (pid" not in said and os.strerror(errno.EMFILE) not in said:
        return None
    fewer = "or lower `train.loader_workers`"
    if f"exit code {errno.ENOSPC}." in said or "Bus error" in said:
        size = shutil.disk_usage("/dev/shm").total / 2**30
        return (
            f"/dev/shm ({size:.3g} GiB) has no room for the microbatches that loader processes hand over: make it "
            f"larger (docker run --shm-size=16g), {fewer}"
        )
    if f"exit code {errno.EMFILE}." in said or os.strerror(errno.EMFILE) in said:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return f"loader processes need more open files than {most}: ulimit -n {_OPEN_FILES}, {fewer}"
    return (
        f"a loader process died: {str(error.__cause__ or error).split('. ')[0]}; see what it said above, or where host "
        f"memory is short, give the job more, {fewer}"
    )
