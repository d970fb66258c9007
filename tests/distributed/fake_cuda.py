"""A stand-in for a GPU: tensors on the device `cuda` that have shapes and dtypes, but no values.

torch's fake tensors may be on `cuda` without a GPU, but its CPU build refuses their backward, which asks for the
device's streams. A few lines of C++ answer (`_HOOKS`). Streams and events of `torch.cuda` are made up in Python.
"""

import ctypes
import shutil
import subprocess
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend `fake`)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Recorder", "build_hooks", "load_hooks"]

# One device, whose only stream is its default one.
_HOOKS = r"""
#include <cstring>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

constexpr auto CUDA = c10::DeviceType::CUDA;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device getDevice() const override { return {CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {CUDA, 0}; }
  c10::Stream getStream(c10::Device on) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, on); }
  c10::Stream getDefaultStream(c10::Device on) const override { return c10::Stream(c10::Stream::DEFAULT, on); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

static Guard guard;
static Hooks hooks;

extern "C" void stand_in() {
  static c10::impl::DeviceGuardImplRegistrar registrar(CUDA, &guard);
  // torch made its own hooks when it was imported. They have no data: with our table of methods they are ours.
  std::memcpy((void*)&at::detail::getCUDAHooks(), (const void*)&hooks, sizeof(void*));
}
"""


def build_hooks(folder: Path) -> Path | None:
    """The hooks as a library in `folder`; None without a C++ compiler."""
    if not (compiler := shutil.which("g++") or shutil.which("clang++")):
        return None
    source, library, of_torch = folder / "hooks.cpp", folder / "hooks.so", Path(torch.__file__).parent
    source.write_text(_HOOKS)
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    command += [f"-I{of_torch}/include", f"-L{of_torch}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return library


def load_hooks(library: Path) -> None:
    """Give this process a stand-in for a GPU, until it ends. It must not have run a backward before."""
    ctypes.CDLL(str(library)).stand_in()
    _STREAMS.append(Stream())
    for name, stand_in in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: _STREAMS[-1],
        "stream": _on,
        "synchronize": lambda device=None: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
    }.items():
        setattr(torch.cuda, name, stand_in)


class Event:
    """An event that has always happened."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None: ...

    def record(self, stream: "Stream | None" = None) -> None: ...

    def wait(self, stream: "Stream | None" = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Stream:
    """A stream that has always done what it was given."""

    def __init__(self, device: object = None, priority: int = 0) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def wait_stream(self, stream: "Stream") -> None:
        assert isinstance(stream, Stream)

    def synchronize(self) -> None: ...


# The streams of nested `with torch.cuda.stream(...)`, innermost last. The first is the stream that computes.
_STREAMS: list[Stream] = []


@contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    _STREAMS.append(stream or _STREAMS[-1])
    yield
    _STREAMS.pop()


class Recorder(TorchDispatchMode):
    """Notes a rank's messages and collectives. Like NCCL, it refuses tensors on the CPU or not contiguous.

    - `sent`, `received`: shape and dtype of each message in order, by channel and the rank at the other end.
    - `shared`: the collectives in order, by the ranks of their group.
    - `waits`: the operations for which the host waits for the GPU, each with the line that asks for it.

    When the host reads a value of a fake tensor, it gets 1, or False. Enter it inside a `FakeTensorMode`, with the
    backend `fake`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[str, int], list] = defaultdict(list)
        self.received: dict[tuple[str, int], list] = defaultdict(list)
        self.shared: dict[tuple[int, ...], list] = defaultdict(list)
        self.waits: list[str] = []
        self._pinned: list[torch.UntypedStorage] = []  # kept, so that no other gets its address

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if operation is torch.ops.aten._pin_memory.default:
            pinned = args[0].clone()
            self._pinned.append(pinned.untyped_storage())
            return pinned
        pinned = {storage._cdata for storage in self._pinned}
        if _waits_for_gpu(operation, args, kwargs or {}, pinned):
            asked = next(own for own in reversed(traceback.extract_stack()[:-1]) if "/torch/" not in own.filename)
            self.waits.append(f"{operation} in {asked.filename}:{asked.lineno}: {asked.line}")
        if operation is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype != torch.bool and (1.0 if args[0].is_floating_point() else 1)
        if operation.namespace == "c10d":
            self._note(operation.__name__.removesuffix(".default"), args)
        return operation(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple) -> None:
        tensors = [own for own in tree_leaves(args) if isinstance(own, torch.Tensor)]
        for own in tensors:
            assert own.device.type == "cuda", f"{name}: NCCL takes no tensor of a {own.device.type}"
            assert own.is_contiguous(), f"{name}: NCCL takes no tensor with gaps"
        group = next(filter(None, map(_as_group, args)))
        ranks = tuple(dist.get_process_group_ranks(group))
        sizes = [(tuple(own.shape), own.dtype) for own in tensors]
        if name in ("send", "recv_"):
            _, _, peer, _ = args
            noted = self.sent if name == "send" else self.received
            noted[group.group_name, ranks[peer]] += sizes
        elif name == "alltoall_base_":
            _, _, _, num_received, num_sent, *_ = args
            for noted, counts in ((self.received, num_received), (self.sent, num_sent)):
                for peer, count in zip(ranks, counts, strict=True):
                    noted[group.group_name, peer].append((count, sizes[0][0][1:], sizes[0][1]))
            self.shared[ranks].append(name)
        else:
            roots = [own for own in args if type(own) is int]
            self.shared[ranks].append((name, sizes, roots))


def _waits_for_gpu(operation: Any, args: tuple, kwargs: dict, pinned: set[int]) -> bool:
    """Whether the host waits for the GPU before it goes on: for a value, for a size that depends on values, or for a
    copy between the two that does not say `non_blocking`, or whose end on the CPU is not in a `pinned` storage."""
    given = [own for own in tree_leaves((args, kwargs)) if isinstance(own, torch.Tensor)]
    devices = {own.device.type for own in given}
    name = operation.overloadpacket.__name__
    if name in ("_to_copy", "copy_"):
        devices.add(torch.device(kwargs.get("device") or args[0].device).type)
        is_blocking = not (kwargs.get("non_blocking") or True in args[2:])
        on_cpu = [own for own in given if own.device.type == "cpu"]
        is_blocking |= any(own.untyped_storage()._cdata not in pinned for own in on_cpu)
        return devices == {"cpu", "cuda"} and is_blocking
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        # A mask is turned into positions, and positions on the CPU are copied.
        places = [own for own in args[1] if own is not None]
        return args[0].is_cuda and any(own.dtype in (torch.bool, torch.uint8) or not own.is_cuda for own in places)
    asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operation.tags)
    return bool(asks) and "cuda" in devices


def _as_group(value: object) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(value)
    except (TypeError, RuntimeError, ValueError):
        return None
