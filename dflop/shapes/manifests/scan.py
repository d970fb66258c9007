"""The scan of a manifest's file, which writes its index: the span and digest of each record.

A table is scanned in a process of its own with limited memory. A few kilobytes may unpack to gigabytes, what its
metadata say of that may be a lie, and damage may end the process that reads it. Later reads ask for the same rows at
once, so a table that is scanned takes no more memory then.
"""

import errno
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

from dflop.base import UserError, printable, progress_bar
from dflop.shapes.manifests.entries import DIGEST_BYTES, EntryReader, RecordSpan, UnreadableFile
from dflop.shapes.manifests.formats import is_table, open_reader

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["NO_RECORD", "scan_tables", "write_index"]

_pack = Struct(f"<QQ{DIGEST_BYTES}s").pack
# The single entry of a file that cannot be read.
NO_RECORD = _pack(*RecordSpan(0, 0, bytes(DIGEST_BYTES)))
# What reading tables may take beyond what Python and its libraries hold at the start.
_MOST_BYTES = 1536 << 20
# How damage ends a process. A signal of another kind comes from somebody else.
_OF_DAMAGE = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# Arrow's own pools of memory reserve a gigabyte at once, which would count.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_table_scanner: subprocess.Popen | None = None


def write_index(manifest: Path, index: Path) -> None:
    """Write an entry for each record: start and end (uint64 each), and the digest; `NO_RECORD` for an unreadable file.

    Raises:
        UserError: when no reader knows the file's suffix, or when a signal from outside ends the process that reads a
            table.
    """
    is_readable = True
    if is_table(manifest):
        is_readable = _is_scanned_apart(manifest, index)
    else:
        try:
            _write(open_reader(manifest), index)
        except UnreadableFile:
            is_readable = False
    if not is_readable:
        index.write_bytes(NO_RECORD)


def _write(reader: EntryReader, index: Path) -> None:
    with index.open("wb") as file, _progress(reader) as bar:
        for number, span in enumerate(reader.scan()):
            file.write(_pack(*span))
            if number % 10_000 == 0:
                bar.update(span.end - bar.n)
    reader.close()


def _is_scanned_apart(manifest: Path, index: Path) -> bool:
    """Whether another process could scan the table. It is started once, and again after a table that it refused."""
    global _table_scanner
    if _table_scanner is None or _table_scanner.poll() is not None:
        command = [sys.executable, "-P", "-c", f"from {__name__} import scan_tables; scan_tables()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _table_scanner = subprocess.Popen(command, env=os.environ | _ENVIRONMENT, **pipes)
    scanner, answer = _table_scanner, ""
    try:
        with suppress(BrokenPipeError):
            print(json.dumps([str(manifest.absolute()), str(index.absolute())]), file=scanner.stdin, flush=True)
            answer = scanner.stdout.readline()
    except BaseException:
        scanner.kill()  # its answer would be taken for that of the next table
        raise
    if answer:
        error = json.loads(answer)
        if error is not None and error["is_last"]:
            scanner.wait()
        if error is not None and not error["is_unreadable"]:
            raise UserError(error["text"])
        return error is None
    code = scanner.wait()
    if code > 0:
        raise RuntimeError(f"the process that reads tables failed at {manifest}; see what it said above")
    if code < 0 and -code not in _OF_DAMAGE:
        raise UserError(f"the process that read {manifest} was ended by {signal.Signals(-code).name}: start again")
    return False


def scan_tables() -> None:
    """Scan the tables that stdin names, `[manifest, index]` in JSON a line. The answer is a line, too: None, or
    `{is_unreadable, is_last, text}`. When memory was short, this ends: some of it may not be free again."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        for line in sys.stdin:
            manifest, index = map(Path, json.loads(line))
            error = _error_of(manifest, index)
            print(json.dumps(error), file=answers, flush=True)
            if error is not None and error["is_last"]:
                return


def _error_of(manifest: Path, index: Path) -> dict[str, object] | None:
    try:
        with _limited_memory("datasets" if manifest.is_dir() else "pyarrow.parquet"):
            _write(open_reader(manifest), index)
    except UserError as error:
        return {"is_unreadable": isinstance(error, UnreadableFile), "is_last": False, "text": str(error)}
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        return {"is_unreadable": True, "is_last": True, "text": str(error)}
    return None


@contextmanager
def _limited_memory(library: str) -> Iterator[None]:
    """The memory of this process is limited as soon as the library is there. Its address space counts, used or not."""
    importlib.import_module(library)
    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    finite = [limit for limit in (*before, now + _MOST_BYTES) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(finite), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _progress(reader: EntryReader) -> "tqdm":
    """A progress bar, shown only if indexing takes more than two seconds."""
    return progress_bar(
        total=reader.size,
        desc=f"indexing {printable(reader.path.name)}",
        unit="",
        unit_scale=True,
        delay=2,
        leave=False,
        file=sys.stderr,
    )
