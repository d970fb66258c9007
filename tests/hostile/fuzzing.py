"""Fuzzing: good files are damaged at random, and a reader has to read or refuse each, in bounded time and memory.

Without `FUZZ_SECONDS` a few hundred files are read, the same each time, in seconds. `FUZZ_SECONDS=600 make fuzz` reads
as many as it can in ten minutes for each test; `FUZZ_SEED` chooses others.
"""

import faulthandler
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["damaged", "fuzz"]

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))

_EXTREMES = (b"\xff" * 4, b"\x7f" + b"\xff" * 3, b"\xff" * 3 + b"\x7f", b"\0" * 4, b"\x80\0\0\0")


def damaged(content: bytes, rng: random.Random) -> bytes:
    """A copy with one to eight bytes or runs of bytes changed, taken out or cut off, mostly in its header."""
    copy = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        if not copy:
            break
        at = rng.randrange(min(len(copy), rng.choice((16, 64, 256, 1024, len(copy)))))
        kind = rng.random()
        if kind < 0.5:
            copy[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif kind < 0.75:
            copy[at : at + 4] = rng.choice(_EXTREMES)
        elif kind < 0.9:
            del copy[at : at + rng.randrange(1, 8)]
        else:
            del copy[at:]
    return bytes(copy)


def fuzz(
    good: Mapping[str, bytes],
    read: Callable[[Path], object],
    refusals: type[Exception] | tuple[type[Exception], ...],
    folder: Path,
    *,
    num_files: int = 300,
    most_s: float = 30.0,
    most_bytes: int = 2 << 30,
    damage: Callable[[bytes, random.Random], bytes] = damaged,
) -> None:
    """Call `read` with damaged copies of the files `good` (content by name); each copy lies under its name in `folder`.

    `read` may raise `refusals`. It may take `most_s` seconds a file, and the process may grow by `most_bytes` in all.
    A copy that is read for half a minute longer ends the process, with a traceback in `folder`/hang.txt.

    Raises:
        AssertionError: naming the copy that broke the reader, which is left in `folder`, and the seed that makes it.
    """
    names, before, end = sorted(good), _peak_bytes(), time.monotonic() + SECONDS
    number = 0
    print(f"FUZZ_SEED={SEED}")
    with _limited_memory(2 * most_bytes), (folder / "hang.txt").open("w") as hang:
        while time.monotonic() < end or number < (0 if SECONDS else num_files):
            rng = random.Random(f"{SEED} {number}")
            file = folder / rng.choice(names)
            file.write_bytes(damage(good[file.name], rng))
            which = f"{file}: copy {number} of FUZZ_SEED={SEED}"
            faulthandler.dump_traceback_later(most_s + 30, exit=True, file=hang)
            start = time.monotonic()
            try:
                read(file)
            except refusals:
                pass
            except Exception as error:
                raise AssertionError(f"{which} raised {error!r}") from error
            finally:
                faulthandler.cancel_dump_traceback_later()
            seconds, grown = time.monotonic() - start, _peak_bytes() - before
            assert seconds <= most_s, f"{which} took {seconds:.0f} s"
            assert grown <= most_bytes, f"{which} took {grown:,} bytes of memory"
            number += 1
    peak = max(_peak_bytes(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024) >> 20
    print(f"{number:,} damaged files of {', '.join(names)}: all read or refused, with {peak:,} MiB at most")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _limited_memory(more_bytes: int) -> Iterator[None]:
    """While it lasts, the process gets no more than so many bytes of address space more: a machine is not to suffer."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
