"""Kernels: functions that numba compiles once. The machine code stays on disk until anything it depends on changes.

Numba's own cache looks only at the kernel's own file: it keeps the old machine code when a kernel that this one calls,
or a number that it reads, changes in another file. Here a cached kernel is valid for one digest: of its own code, the
numbers that it reads, and all kernels that it calls, in whichever file.

Nor is numba's cache safe where processes compile at the same time, as ranks and workers of pytest do. Its index names
the file of each signature, and is written before the file is: another process may find older machine code there, or
that of another signature, which overwrites memory when it is called. Here each signature has a file of its own, which
says what it is of.
"""

import hashlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher
from numba.core.types import BaseNamedTuple, BaseTuple

__all__ = ["kernel"]


def kernel(function: Callable | None = None, *, inline: str = "never") -> Any:
    """The decorator `numba.njit` with a cache on disk that also notices changes in other files; used as `@kernel`.

    It notices changes of the global names that the kernel reads (numbers, tuples of them, other kernels), and of the
    field names of named tuples among its arguments. It notices no changes of `module.NUMBER` and of closures.
    """
    if function is None:
        return lambda decorated: kernel(decorated, inline=inline)
    compiled = njit(function, inline=inline)
    compiled._cache = _KernelCache(function)
    return compiled


class _KernelCache(FunctionCache):
    """Numba's cache with the digest in place of the file's time and size."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # The digest is made at the first call, not at decoration: the kernel may call functions that are defined below.
        self._cache_file = _KernelFiles(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=_digest_of(self._py_func),
        )
        return super().load_overload(sig, target_context)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # A named tuple's type gives the types of its fields, but not the order of their names.
        return (*super()._index_key(sig, codegen), tuple(_fields_of(sig)))


class _KernelFiles(IndexDataCacheFile):
    """The files of a kernel, one for each signature, kind of CPU and version of numba. Each is written beside its place
    and then moved there, and holds what it is of: the kernel's digest and the signature."""

    def load(self, key: tuple) -> Any:
        try:
            of, data = self._load_data(self._file_of(key))
        except Exception:  # none yet, or of code that has moved since, or the machine went down as it was written
            return None
        return data if of == (self._source_stamp, key) else None

    def save(self, key: tuple, data: Any) -> None:
        self._save_data(self._file_of(key), ((self._source_stamp, key), data))

    def _file_of(self, key: tuple) -> str:
        types, cpu, _, fields = key
        name = hashlib.sha256(repr((self._version, types, cpu, fields)).encode()).hexdigest()[:16]
        return self._data_name_pattern.replace("{number:d}", name)


def _fields_of(types: Any) -> Iterator[tuple[str, ...]]:
    """The field names of each named tuple among these types, and of each named tuple that one of them contains."""
    for kind in types:
        if isinstance(kind, BaseNamedTuple):
            yield kind.fields
        if isinstance(kind, BaseTuple):
            yield from _fields_of(kind.types)


def _digest_of(function: Callable) -> str:
    parts, seen, waiting = [], {function}, [function]
    while waiting:
        callee = waiting.pop()
        parts.append(f"{callee.__module__}.{callee.__qualname__}{callee.__defaults__}")
        for code in _all_code(callee.__code__):
            constants = [value for value in code.co_consts if not isinstance(value, CodeType)]
            parts.append(f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}")
            for name in code.co_names:
                value = callee.__globals__.get(name)
                if isinstance(value, Dispatcher):
                    if value.py_func not in seen:
                        seen.add(value.py_func)
                        waiting.append(value.py_func)
                elif isinstance(value, bool | int | float | tuple):
                    parts.append(f"{name}={value!r}")
                elif hasattr(value, "tobytes"):
                    parts.append(f"{name}={value.tobytes().hex()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _all_code(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_code(constant)
