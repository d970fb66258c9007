"""The scan of a manifest's file, which writes its index: the span and digest of each record.

A table is scanned in a process of its own with limited memory. A few kilobytes may unpack to gigabytes, what its
metadata say of that may be a lie, and damage may end the process that reads it. Later reads ask for the same rows at
once, so a table that is scanned takes no more memory then.
"""

import json
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

from dflop.base import printable, progress_bar
from dflop.shapes.manifests.entries import DIGEST_BYTES, EntryReader, RecordSpan, UnreadableFile
from dflop.shapes.manifests.formats import open_reader

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["NO_RECORD", "scan_tables", "write_index"]

_pack = Struct(f"<QQ{DIGEST_BYTES}s").pack
# The single entry of a file that cannot be read.
NO_RECORD = _pack(*RecordSpan(0, 0, bytes(DIGEST_BYTES)))
# What the scan of a table may take beyond what Python and its libraries do.
_MOST_BYTES = 1536 << 20
_DONE, _REFUSED = "done\n", "refused\n"
_table_scanner: subprocess.Popen | None = None


def write_index(manifest: Path, index: Path) -> None:
    """Write an entry for each record: start and end (uint64 each), and the digest; `NO_RECORD` for an unreadable file.

    Raises:
        UserError: when the file is none that a manifest can have.
    """
    try:
        reader = open_reader(manifest)
        if manifest.is_dir() or manifest.suffix == ".parquet":
            reader.close()
            if _is_scanned_apart(manifest, index):
                return
        else:
            _write(reader, index)
            return
    except UnreadableFile:
        pass
    index.write_bytes(NO_RECORD)


def _write(reader: EntryReader, index: Path) -> None:
    with index.open("wb") as file, _progress(reader) as bar:
        for number, span in enumerate(reader.scan()):
            file.write(_pack(*span))
            if number % 10_000 == 0:
                bar.update(span.end - bar.n)
    reader.close()


def _is_scanned_apart(manifest: Path, index: Path) -> bool:
    """Whether another process could scan the table; it is started once and scans all of this process's tables."""
    global _table_scanner
    if _table_scanner is None or _table_scanner.poll() is not None:
        command = [sys.executable, "-c", f"from {__name__} import scan_tables; scan_tables()"]
        _table_scanner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    answer = ""
    with suppress(BrokenPipeError):
        print(json.dumps([str(manifest.absolute()), str(index.absolute())]), file=_table_scanner.stdin, flush=True)
        answer = _table_scanner.stdout.readline()
    if answer:
        return answer == _DONE
    if _table_scanner.wait() > 0:
        raise RuntimeError(f"the process that scans tables failed at {manifest}; see what it said above")
    return False


def scan_tables() -> None:
    """Scan the tables that stdin names, `[manifest, index]` in JSON a line, and answer each with a line."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (now + _MOST_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin:
        answer = _DONE
        try:
            manifest, index = map(Path, json.loads(line))
            _write(open_reader(manifest), index)
        except (MemoryError, UnreadableFile):
            answer = _REFUSED
        print(answer, end="", flush=True)


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
