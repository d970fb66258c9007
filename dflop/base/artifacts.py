"""How files of a run are written, whole or not at all, and the folder in which processes cache results."""

import contextlib
import functools
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dflop.base.errors import printable

__all__ = ["cache_folder", "set_torn_aside", "temporary_folder", "written_whole"]


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes `path`'s place when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part{path.suffix}")
    try:
        yield beside
        os.replace(beside, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # "No space left on device" alone says too little
        raise
    finally:
        beside.unlink(missing_ok=True)


def set_torn_aside(path: Path, why: str) -> None:
    """Move a file with damaged contents to `path`.torn, where nothing looks for it, and print a warning with `why`."""
    aside = path.rename(path.with_name(f"{path.name}.torn"))
    print(printable(f"dflop: warning: {path}: {why}; the file as it was is {aside}"), file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """The folder in which processes cache what takes long to compute.

    In a workflow's folder this is `.snakemake/dflop`. Elsewhere, where a command was started by hand, it is the user's
    cache folder. Where neither can be written, it is a folder in the system's temporary folder.
    """
    if Path(".snakemake").is_dir() and os.access(".snakemake", os.W_OK):
        return Path(".snakemake/dflop")
    with contextlib.suppress(OSError, RuntimeError):  # a RuntimeError for a user without a home folder
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dflop")
        user.mkdir(parents=True, exist_ok=True)
        if os.access(user, os.W_OK):
            return user
    return temporary_folder()


def temporary_folder() -> Path:
    """A folder in the system's temporary folder that only this user can enter. A later process finds it again, unless
    another user has taken its name."""
    return _own_folder_in(tempfile.gettempdir())


@functools.cache
def _own_folder_in(directory: str) -> Path:
    folder = Path(directory) / f"dflop-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
    return folder if is_ours else Path(tempfile.mkdtemp(prefix="dflop-"))
