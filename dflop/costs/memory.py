"""The memory of a stage on a rank, from the bytes of its parts and of its parameters."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from dflop.costs.stage_kind import StageKind
from dflop.models.loads import Coefficients

__all__ = ["Resident", "StageMemory", "memory_of_parts", "resident_bytes", "resident_parts"]


class StageMemory(NamedTuple):
    """Bytes of one stage on one rank, for each microbatch: `activation_bytes` while the microbatch is in flight, and
    `transient_bytes` on top of them while it is computed."""

    activation_bytes: np.ndarray
    transient_bytes: np.ndarray


Bytes = TypeVar("Bytes", float, np.ndarray)
Form = TypeVar("Form", np.ndarray, Coefficients)


class Resident(NamedTuple):
    """Bytes that a rank always holds of a stage: parameters in the computing precision, or shards of them; gradients;
    and the optimiser's moments and master weights."""

    parameters: float | np.ndarray
    gradients: float | np.ndarray
    optimizer: float | np.ndarray


def resident_parts(
    parameter_bytes: float | np.ndarray, dp: int, *, value_bytes: int, is_frozen: bool, num_shards: int = 1
) -> Resident:
    """The bytes of a stage with `dp` replicas and `parameter_bytes` of parameters in fp32.

    Parameters are values of `value_bytes`. Where they are trained, gradients and AdamW's two moments are in fp32 at
    least, and parameters in a smaller precision have fp32 masters. Moments and masters are divided among the replicas.
    With `num_shards` above 1, each group of `num_shards` replicas shards the parameters and everything else. Of trained
    parameters only the masters are then held, which serve for computing, too."""
    count, held_bytes = parameter_bytes / 4, max(4, value_bytes)
    if is_frozen:
        return Resident(count * (value_bytes / num_shards), 0.0 * count, 0.0 * count)
    if num_shards > 1:
        own = count * (held_bytes / num_shards)
        return Resident(own, own, 2 * own)
    masters_bytes = held_bytes if value_bytes < held_bytes else 0
    return Resident(count * value_bytes, count * held_bytes, count * ((2 * held_bytes + masters_bytes) / dp))


def resident_bytes(parameter_bytes: Bytes, dp: int, *, value_bytes: int, is_frozen: bool, num_shards: int = 1) -> Bytes:
    """The sum of `resident_parts`."""
    how = {"value_bytes": value_bytes, "is_frozen": is_frozen, "num_shards": num_shards}
    return sum(resident_parts(parameter_bytes, dp, **how))


def memory_of_parts(kind: StageKind, kept: Mapping[str, Form], passing: Mapping[str, Form]) -> tuple[Form, list[Form]]:
    """What a microbatch keeps on a stage, and what each of the stage's parts needs on top of that while it computes.

    `kept` and `passing` give both for one unit of each part: as bytes at some loads, or as functions of the loads.
    """
    each = {part: passing[part] for part, _ in kind.parts}
    if kind.module == "llm" and kind.is_last:
        # When backward reaches the layers, the head's activations are free (those of an encoder's last part are not).
        each |= {part: own + -1.0 * kept["last"] for part, own in each.items() if part != "last"}
    if "recomputed_layer" in each and "layer" in each:
        # A stage's first layers are the recomputed ones: when backward reaches them, the others' activations are free.
        freed = -float(dict(kind.parts)["layer"]) * kept["layer"]
        each["recomputed_layer"] = each["recomputed_layer"] + freed
    return kind.total(kept), list(each.values())
