"""The index of a checkpoint's tensors, `.metadata`, which torch writes as a pickle: read without running its code.

A pickle may name any function for its reader to call. Here it may name the classes of an index, and nothing else.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path, PosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.serialization import _get_layout

from dflop.base import UserError, printable

__all__ = ["IndexReader"]


def _member(of: Any, name: Any) -> Any:
    """A way to lay out a tensor. Python 3.11.2, which is Debian 12's, writes one as `getattr` of its class."""
    if of is not metadata._MEM_FORMAT_ENCODING or name not in of.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr, as no checkpoint of dflop does")
    return of[name]


_NAMED = {
    ("builtins", "getattr"): _member,
    **{
        (of.__module__, of.__name__): of
        for of in (
            metadata.Metadata,
            metadata.TensorStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
            _get_layout,
        )
    },
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)},
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # as Python 3.13 calls it
}


_DEEPEST = 4


class IndexReader(FileSystemReader):
    """torch's reader of a checkpoint's folder, for checkpoints that `save_tensors` has written."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """The index.

        Raises:
            UserError: when it is damaged, holds or names what no index has, or a file of another folder.
        """
        path = Path(self.path) / ".metadata"
        try:
            index = _Unpickler(io.BytesIO(path.read_bytes())).load()
            is_index = all(map(_is_tensor, index.state_dict_metadata.items())) and all(
                map(_is_place, index.storage_data.items())
            )
            strange = [info.relative_path for info in index.storage_data.values() if "/" in info.relative_path]
        except pickle.UnpicklingError as error:
            raise UserError(_refused(path, str(error))) from None
        except Exception as error:  # a damaged pickle raises whatever it comes to
            raise UserError(_refused(path, f"it is damaged ({type(error).__name__}: {error})")) from None
        if not is_index or not isinstance(index, metadata.Metadata):
            raise UserError(_refused(path, "it is no index of tensors and of where they are"))
        if strange:
            raise UserError(_refused(path, f"it names the file {strange[0]}"))
        return index


def _flat(make_tuple: Callable[["_Unpickler"], None]) -> Callable[["_Unpickler"], None]:
    """Refuse tuples that hold each other many times over: hashing one would not end."""

    def make(unpickler: "_Unpickler") -> None:
        make_tuple(unpickler)
        if _depth(unpickler.stack[-1]) > _DEEPEST:
            raise pickle.UnpicklingError(f"it holds tuples more than {_DEEPEST} deep, as no checkpoint of dflop does")

    return make


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, value), default=0) if type(value) is tuple else 0


class _Unpickler(pickle._Unpickler):
    """In Python, where a pickle's memo is a dict: in C, a few bytes ask for gigabytes of it."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)
    # One asks for as much memory as it says; no index holds sets.
    for code in (pickle.BYTEARRAY8, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        del dispatch[code[0]]

    def load_build(self) -> None:
        if not is_dataclass(type(self.stack[-2])):
            raise pickle.UnpicklingError("it sets attributes of what is no entry, as no checkpoint of dflop does")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
    for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[code[0]] = _flat(dispatch[code[0]])

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, as no checkpoint of dflop does")
        return _NAMED[module, name]


def _is_tensor(entry: tuple[Any, Any]) -> bool:
    """Whether a name and what is said of it are of a tensor."""
    name, about = entry
    sizes = [about.size, *(size for chunk in about.chunks for size in (chunk.offsets, chunk.sizes))]
    has_sizes = all(isinstance(size, torch.Size) and len(size) == len(about.size) for size in sizes)
    return isinstance(name, str) and isinstance(about, metadata.TensorStorageMetadata) and has_sizes


def _is_place(entry: tuple[Any, Any]) -> bool:
    """Whether a block's name and what is said of it are of bytes in a file."""
    index, info = entry
    is_range = all(isinstance(number, int) and 0 <= number < 2**63 for number in (info.offset, info.length))
    is_plain = isinstance(info.relative_path, str) and not info.transform_descriptors
    return isinstance(index, metadata.MetadataIndex) and is_range and is_plain


def _refused(path: Path, why: str) -> str:
    onward = "delete this checkpoint, and training goes on from the one before, if that is your own"
    return f"{path}: {printable(why)}; {onward}"
