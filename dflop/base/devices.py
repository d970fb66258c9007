"""Devices by their data sheets, to plan for hardware that is not at hand: `devices.yaml` and files like it."""

import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from yaml import YAMLError, safe_load

from dflop.base.errors import UserError

__all__ = [
    "COMMUNICATOR_BYTES",
    "EXCHANGE_SHARE",
    "HOP_S",
    "MESSAGE_BYTES_PER_S",
    "MESSAGE_CTAS",
    "NETWORK_HOP_S",
    "UPDATE_SHARE",
    "DeviceModel",
    "find_device",
    "load_device",
]

# What a communicator takes where nothing else is known (`devices.yaml`).
COMMUNICATOR_BYTES = 0.41e9
# Thread blocks of a message on a GPU, each of which holds an SM while the message waits: on all channels at most 32 of
# 108. Each is taken to move 20 GB/s over NVLink, which nobody has measured here: a message does not have all of a
# node's links. A network card is slower.
MESSAGE_CTAS = 4
MESSAGE_BYTES_PER_S = MESSAGE_CTAS * 20e9
# The share of a GPU's links that an exchange of keys and values is taken to have, which nobody has measured here: three
# quarters on the way, and each byte is then written and read twice in the GPU's memory. An H100 (450 GB/s over NVLink,
# 2.85 TB/s of memory): 1 / (1 / 0.75 + 4 * 450 / 2850).
EXCHANGE_SHARE = 0.5
# A step of a collective's ring: over NVLink where no data sheet says it (`hop_s`), and from node to node. NCCL's tuning
# tables have these for large messages.
HOP_S, NETWORK_HOP_S = 3.4e-6, 14e-6
# What an optimiser's step reaches of the memory's bandwidth that pointwise kernels reach. On an H200, of a copy's:
# AdamW's update 0.81, the norm 0.66, and all in one 0.84.
UPDATE_SHARE = 0.84
_MAY_BE_ZERO = (
    *("launch_s", "dispatch_s", "collective_s", "hop_s"),
    *("overhead_bytes", "communicator_bytes", "allocator_share"),
)
_OURS = Path(__file__).with_name("devices.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModel:
    """A device by its data sheet and the shares of it that kernels reach; `devices.yaml` explains each number."""

    name: str
    peak_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    matmul_share: float
    matmul_half_size: float
    attention_share: float
    memory_share: float
    link_share: float
    launch_s: float
    dispatch_s: float = 10e-6
    collective_s: float = 89e-6
    hop_s: float = HOP_S
    network_bytes_per_s: float = 6.25e9
    host_bytes_per_s: float = 20e9
    overhead_bytes: float = 0.0
    communicator_bytes: float = COMMUNICATOR_BYTES
    allocator_share: float = 0.0

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / 2**30

    @property
    def most_memory_gib(self) -> float:
        """The most GiB that a device of this data sheet may have: many sheets say GB and mean GiB."""
        return self.memory_bytes / 1e9

    @property
    def update_bytes_per_s(self) -> float:
        """What an optimiser's step reads and writes in a second."""
        return self.memory_bytes_per_s * self.memory_share * UPDATE_SHARE

    def matmul_flops_per_s(self, size: np.ndarray) -> np.ndarray:
        """FLOP/s of matrix products by their size (tokens x hidden size / tp), an array of the shape of `size`.

        The rate grows with the size up to `matmul_share` of the peak.
        """
        size = np.maximum(size, 1.0)
        return self.peak_flops_per_s * self.matmul_share * size / (size + self.matmul_half_size)


def load_device(name: str, path: Path | None = None) -> DeviceModel:
    """The device `name` of the file `path`, or of our `devices.yaml` where `path` is None or has no such device.

    Raises:
        UserError: for an unknown name, listing the known ones; for an entry that is no device, naming the key; and for
            a file that cannot be read.
    """
    known = _known_entries(path)
    if name not in known:
        raise UserError(
            f"`cluster.device_model` is {name!r}, a device of which no data sheet is known; choose one of "
            f"{', '.join(known)}, or copy an entry of {_OURS} to a YAML file of your own, put your device's numbers in "
            "and name the file in `cluster.device_models`"
        )
    where, entry = known[name]
    return DeviceModel(name=name, **_checked_numbers(entry, f"{where}: `{name}"))


def find_device(name: str, path: Path | None = None) -> DeviceModel | None:
    """As `load_device`, but None for an unknown name: where costs are measured, a device may have any name."""
    return load_device(name, path) if name in _known_entries(path) else None


def _known_entries(path: Path | None) -> dict[str, tuple[str, Any]]:
    """Every device's file and entry; an entry of the user's own file replaces ours of the same name."""
    read = [_OURS] if path is None else [_OURS, path]
    return {name: (str(file), entry) for file in read for name, entry in _read_entries(file).items()}


def _read_entries(path: Any) -> dict[str, Any]:
    try:
        entries = safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError) as error:
        named = "" if path == _OURS else " (`cluster.device_models` names it)"
        raise UserError(f"{path}{named} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        found = "nothing" if entries is None else f"a {type(entries).__name__}"
        raise UserError(f"{path} holds {found}; it must hold one entry a device")
    return {str(key): entry for key, entry in entries.items()}


def _checked_numbers(entry: Any, where: str) -> dict[str, float]:
    """The entry's numbers. YAML reads `312e12` as a text, so texts are converted to numbers."""
    wanted = [item.name for item in fields(DeviceModel) if item.name != "name"]
    optional = [item.name for item in fields(DeviceModel) if item.default is not MISSING]
    if not isinstance(entry, dict):
        raise UserError(f"{where}` must hold the keys {', '.join(wanted)}")
    for key in entry:
        if key not in wanted:
            raise UserError(f"{where}.{key}` is not known; the keys are {', '.join(wanted)}")
    numbers = {}
    for key in wanted:
        if key not in entry and key in optional:
            continue
        if key not in entry:
            raise UserError(f"{where}.{key}` is missing; {_OURS} explains it")
        try:
            number = float(entry[key]) if not isinstance(entry[key], bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        most = 1.0 if key.endswith("_share") else math.inf
        may_be_zero = key in _MAY_BE_ZERO
        is_enough = number >= 0 if may_be_zero else number > 0
        if not (is_enough and number <= most and math.isfinite(number)):
            right = "a share" if most == 1.0 else "a number"
            right += (" from 0" if may_be_zero else " above 0") + (" to 1" if most == 1.0 else "")
            raise UserError(f"{where}.{key}` is {entry[key]!r}; it must be {right}")
        numbers[key] = number
    return numbers
