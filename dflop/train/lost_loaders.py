"""Errors of loader processes in one line: bad samples, and processes that die or cannot hand over what they loaded.

A loader hands tensors over in shared memory, as open files. Both are scarce in containers. A rank that has too many
files open for another reason gets a line as well, which blames no loader.
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
# What Python says when a process sends an open file to one that may open no more, and what torch makes of it.
_NO_FILE_CAME = "received 0 items of ancdata"
_TORCH_TOLD = "Communication with the workers is no longer possible"


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
    """One line on lost loader processes or too many open files, from the error that is raised in a rank; None for
    another error."""
    if isinstance(error, (ConnectionError, EOFError)) or _NO_FILE_CAME in str(error):
        try:  # perhaps a loader died while it handed something over
            time.sleep(_NOTICED_S)
        except RuntimeError as later:  # which torch raises in the main thread as soon as it notices
            error = later
    said = f"{error} {error.__cause__}"
    fewer = "or lower `train.loader_workers`"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    more_files = f"needs more open files than {most}: ulimit -n {_OPEN_FILES}"
    if f"exit code {errno.EMFILE}." in said or _was_not_handed_over(error):
        return f"what loader processes hand over {more_files}, {fewer}"
    is_of_loader = "DataLoader worker (pid" in said
    if not is_of_loader and os.strerror(errno.EMFILE) in said:
        return f"{error}: this rank {more_files}"
    has_no_room = f"exit code {errno.ENOSPC}." in said or "Bus error" in said
    # The locks of the loaders' queues lie in shared memory, too.
    if (is_of_loader and has_no_room) or _is_raised_in(error, "multiprocessing/synchronize.py", errno.ENOSPC):
        size = shutil.disk_usage("/dev/shm").total / 2**30
        return (
            f"/dev/shm ({size:.3g} GiB) has no room for the microbatches that loader processes hand over: make it "
            f"larger (docker run --shm-size=16g), {fewer}"
        )
    if not is_of_loader:
        return None
    return (
        f"a loader process died: {str(error.__cause__ or error).split('. ')[0]}; see what it said above, or where host "
        f"memory is short, give the job more, {fewer}"
    )


def _was_not_handed_over(error: BaseException) -> bool:
    """Whether this rank could open no more files while it took tensors from a loader."""
    if _NO_FILE_CAME in str(error) or _TORCH_TOLD in str(error):
        return True
    return _is_raised_in(error, "torch/multiprocessing/reductions.py", errno.EMFILE)


def _is_raised_in(error: BaseException, file: str, number: int) -> bool:
    """Whether an error with the operating system's `number` was raised by what a file calls."""
    frames = traceback.walk_tb(error.__traceback__)
    is_there = any(frame.f_code.co_filename.endswith(file) for frame, _ in frames)
    return is_there and os.strerror(number) in str(error)
