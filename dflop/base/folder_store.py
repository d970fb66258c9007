"""A key-value store of processes of one machine: a file for each key, in a folder that only their user can enter.

It has those methods of torch's stores that ranks use for messages. torch's own store in a file keeps all values that it
ever had: the schedules of a long run would fill the disk.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

__all__ = ["FolderStore"]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.02


class FolderStore(dist.Store):
    """Values are bytes. Reading one that is not there yet waits for it.

    `get`, `multi_get` and `wait` raise `torch.distributed.DistStoreError` after `longest_wait`.
    """

    def __init__(self, folder: Path, longest_wait: timedelta) -> None:
        super().__init__()
        folder.mkdir(exist_ok=True)
        self._folder, self._longest_wait = folder, longest_wait

    def clone(self) -> "FolderStore":
        return self

    def set(self, key: str, value: str | bytes) -> None:
        path = self._path(key)
        beside = path.with_name(f"{path.name} {os.getpid()} {threading.get_ident()}")
        beside.write_bytes(value.encode() if isinstance(value, str) else value)
        beside.replace(path)

    def get(self, key: str) -> bytes:
        self.wait([key], self._longest_wait)
        return self._path(key).read_bytes()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], longest_wait: timedelta) -> None:
        until, between_s = time.monotonic() + longest_wait.total_seconds(), _FIRST_WAIT_S
        for path in map(self._path, keys):
            while not path.exists():
                if time.monotonic() > until:
                    raise dist.DistStoreError(f"{path} is not there after {longest_wait.total_seconds():.0f} s")
                time.sleep(between_s)
                between_s = min(2 * between_s, _LONGEST_WAIT_S)

    def delete_key(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._path(key).unlink()
            return True
        return False

    deleteKey = delete_key  # by this name torch's `PrefixStore` asks for it

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that nobody has set, and return its value; empty while another process is setting it."""
        assert not expected
        with contextlib.suppress(FileExistsError), self._path(key).open("xb") as file:
            file.write(desired.encode())
        return self.get(key)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")
