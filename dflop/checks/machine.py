"""What of this machine matters to training: versions, cards, compilers, interfaces and limits; and what is missing.

`look` reads it in a few seconds and changes nothing. `findings` and `table` decide from it alone what to say.
"""

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dflop.base.compilers import COMPILERS, find_compiler
from dflop.base.process_memory import available_bytes

__all__ = ["Finding", "Machine", "findings", "look", "table"]

_PACKAGES = ("torch", "transformers", "triton", "flash-attn", "flash-attn-3")
_OLDEST_TORCH = (2, 11)
# A loader's worker hands its tensors over through shared memory: a microbatch of pictures is some 100 MB.
_SHM_BYTES = 8 * 2**30
_OPEN_FILES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine as one process sees it. Versions and paths are None for what is not there.

    - `cuda`: the version that torch is built with.
    - `cards`: those that torch can use. `num_present`: how many the driver knows. `has_hopper`: whether the first one
      is of the generation that flash-attn 3 is for.
    - `attention`: the kernel of packed attention in bf16 (`kernel_name`), None where torch or transformers is missing.
    - `interfaces`: of the network, with their state. `infiniband`: the network cards that NCCL can use directly.
    - `locked_bytes`, `open_files`: the limits of a process; infinite ones are -1.
    """

    python: str
    packages: Mapping[str, str | None]
    cuda: str | None
    nccl: str | None
    driver: str | None
    cards: tuple[str, ...]
    num_present: int
    has_hopper: bool
    attention: str | None
    compilers: Mapping[str, str | None]
    has_python_header: bool
    interfaces: Mapping[str, str]
    infiniband: tuple[str, ...]
    shm_bytes: int
    memory_bytes: float
    locked_bytes: int
    open_files: int
    cores: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is missing, and for what. Without what `is_needed`, nothing can be trained here."""

    what: str
    is_needed: bool = False


def look() -> Machine:
    """This machine."""
    cuda, nccl, cards = _of_torch()
    driver, num_present = _of_driver()
    has_hopper, attention = _of_attention()
    return Machine(
        python=platform.python_version(),
        packages={name: _version(name) for name in _PACKAGES},
        cuda=cuda,
        nccl=nccl,
        driver=driver,
        cards=cards,
        num_present=num_present,
        has_hopper=has_hopper,
        attention=attention,
        compilers={variable: find_compiler(variable) for variable in COMPILERS},
        has_python_header=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        interfaces={name: _read(Path("/sys/class/net", name, "operstate")) for _, name in socket.if_nameindex()},
        infiniband=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        shm_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        memory_bytes=available_bytes(),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cores=len(os.sched_getaffinity(0)),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _of_torch() -> tuple[str | None, str | None, tuple[str, ...]]:
    """torch's CUDA and NCCL, and the cards that it can use."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library of CUDA cannot be loaded
        return None, None, ()
    nccl, cards = None, []
    if torch.version.cuda and torch.distributed.is_nccl_available():
        with contextlib.suppress(RuntimeError):
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    for number in range(torch.cuda.device_count()):
        with contextlib.suppress(RuntimeError):
            of_card = torch.cuda.get_device_properties(number)
            cards.append(f"{of_card.name}, {of_card.total_memory / 2**30:.1f} GiB")
    return torch.version.cuda, nccl, tuple(cards)


def _of_attention() -> tuple[bool, str | None]:
    """Whether the first card is of Hopper's generation, and the kernel of packed attention, found as training does."""
    try:
        import torch

        from dflop.models.attention import is_hopper, kernel_name
    except (ImportError, OSError):
        return False, None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return is_hopper(device), kernel_name(device, torch.bfloat16)


def _of_driver() -> tuple[str | None, int]:
    """The driver's version, and how many cards it knows."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None, 0
    return (lines[0] if lines else None), len(lines)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def findings(machine: Machine) -> list[Finding]:
    """What is missing, what is needed first."""
    found = []
    version = machine.packages["torch"]
    if version is None or tuple(map(int, version.split("+")[0].split(".")[:2])) < _OLDEST_TORCH:
        found.append(Finding(f"torch 2.11 or newer, for all but planning (found: {version or 'none'})", is_needed=True))
    if machine.packages["transformers"] is None:
        found.append(Finding("transformers, for models and tokenizers: pip install transformers", is_needed=True))
    if machine.num_present and not machine.cards:
        built = f"is built with CUDA {machine.cuda}" if machine.cuda else "is built without CUDA"
        found.append(
            Finding(
                f"a torch that can use the {machine.num_present} GPU(s) here: it {built}, and the driver is "
                f"{machine.driver}; install the build that belongs to the driver",
                is_needed=True,
            )
        )
    if not machine.num_present:
        found.append(Finding("a GPU, for `cluster.device: cuda`; on CPUs all can be tried, and planning needs none"))
    if machine.compilers["CXX"] is None and not machine.cards:
        found.append(Finding("a C++ compiler, for `train.compile: on` on CPUs: install g++, or set CXX"))
    if machine.cards:
        found += _for_cards(machine)
    if 0 <= machine.open_files < _OPEN_FILES:
        found.append(
            Finding(f"open files ({machine.open_files}), for many loaders and shards: ulimit -n {_OPEN_FILES}")
        )
    if machine.shm_bytes < _SHM_BYTES:
        size = f"{machine.shm_bytes / 2**30:.1f} GiB"
        found.append(
            Finding(f"room in /dev/shm ({size}), for loader processes: docker run --shm-size=16g, or mount more")
        )
    return sorted(found, key=lambda own: not own.is_needed)


def _for_cards(machine: Machine) -> list[Finding]:
    found = []
    if machine.packages["triton"] is None:
        found.append(Finding("triton, for compiled layers (eager ones are slower): install torch's CUDA build"))
    if machine.compilers["CC"] is None or not machine.has_python_header:
        lacks = "a C compiler (gcc, or set CC)" if machine.compilers["CC"] is None else "Python.h (python3-dev)"
        found.append(Finding(f"{lacks}, for compiled layers: without, they run eager, which is slower"))
    if machine.has_hopper and machine.attention != "flash-attn 3":
        found.append(Finding("flash-attn 3, for the quickest attention on Hopper: build `hopper/` of its repository"))
    elif machine.attention == "torch varlen":
        found.append(Finding("flash-attn, for quicker attention: pip install dflop[gpu]"))
    if not any(state == "up" for name, state in machine.interfaces.items() if name != "lo"):
        found.append(Finding("a network interface that is up, for several nodes"))
    if 0 <= machine.locked_bytes < 2**30:
        found.append(Finding("locked memory, for InfiniBand between nodes: ulimit -l unlimited"))
    return found


def table(machine: Machine) -> str:
    """The machine, a line for each fact, and below it what is missing."""
    without_cards = f"torch can use none of {machine.num_present}" if machine.num_present else "no GPU here"
    rows = [
        ("python", machine.python),
        *((name, version or "not installed") for name, version in machine.packages.items()),
        ("torch's CUDA", machine.cuda or "none: a build for CPUs"),
        ("NCCL", machine.nccl or "none"),
        ("driver", machine.driver or "none"),
        *(("card", card) for card in machine.cards or (without_cards,)),
        ("attention", machine.attention or "unknown without torch and transformers"),
        *((f"compiler {name}", path or "not found") for name, path in machine.compilers.items()),
        ("Python.h", "found" if machine.has_python_header else "not found"),
        ("interfaces", ", ".join(f"{name} ({state})" for name, state in machine.interfaces.items())),
        ("InfiniBand", ", ".join(machine.infiniband) or "none"),
        ("/dev/shm", f"{machine.shm_bytes / 2**30:.1f} GiB free"),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB available"),
        ("locked memory", _limit(machine.locked_bytes, 2**30, " GiB")),
        ("open files", _limit(machine.open_files, 1, "")),
        ("cores", str(machine.cores)),
    ]
    lines = [f"{name:15}{value}" for name, value in rows]
    found = findings(machine)
    lines += ["", "Missing:" if found else "Nothing is missing."]
    lines += [f"- {'NEEDED: ' if own.is_needed else ''}{own.what}" for own in found]
    return "\n".join(lines)


def _limit(value: int, unit: int, name: str) -> str:
    return "unlimited" if value < 0 else f"{value / unit:,.0f}{name}"
