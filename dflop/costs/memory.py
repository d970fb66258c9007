"""What a stage holds on a rank: what follows from its parts' bytes, and from its parameters'."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from dflop.costs.stage_kind import StageKind
from dflop.models.loads import Coefficients

__all__ = ["Resident", "StageMemory", "memory_of_parts", "resident_bytes", "resident_parts", "sync_bytes"]


class StageMemory(NamedTuple):
    """Bytes of one stage on one rank: what each microbatch in flight keeps, and what comes on top of that while the
    microbatch is computed."""

    activation_bytes: np.ndarray
    transient_bytes: np.ndarray


Bytes = TypeVar("Bytes", float, np.ndarray)
Form = TypeVar("Form", np.ndarray, Coefficients)


class Resident(NamedTuple):
    """What a rank always holds of a stage: parameters as they are computed with, or their shards; gradients; and of the
    optimiser moments and masters."""

    parameters: float | np.ndarray
    gradients: float | np.ndarray
    optimizer: float | np.ndarray


def resident_parts(
    parameter_bytes: float | np.ndarray, dp: int, *, value_bytes: int, is_frozen: bool, num_shards: int = 1
) -> Resident:
    """Of a stage with so many replicas and `parameter_bytes` of parameters in fp32.

    Parameters are values of `value_bytes`; where they are trained, gradients and AdamW's two moments are in fp32 at
    least, and smaller values have fp32 masters. Moments and masters are divided among the replicas. Where parameters
    are divided among `num_shards` of the replicas, so is everything else, and the masters are all there is of them."""
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


def sync_bytes(parameter_bytes: Bytes, *, value_bytes: int, num_shards: int | np.ndarray = 1) -> Bytes:
    """What a gradient sync moves, as bytes of an all-reduce: half of it is gradients that are summed, in fp32 at least,
    half the updated values on their way back. Shards of parameters have gradients to sum alone, there and back."""
    back_bytes = np.where(np.asarray(num_shards) > 1, max(4, value_bytes), value_bytes)
    return parameter_bytes / 4 * ((max(4, value_bytes) + back_bytes) / 2)


def memory_of_parts(kind: StageKind, kept: Mapping[str, Form], passing: Mapping[str, Form]) -> tuple[Form, list[Form]]:
    """What a stage's microbatch keeps, and what each of its parts in turn needs on top of that.

    `kept` and `passing` are of each part once: bytes at some loads, or functions of the loads.
    """
    each = {part: passing[part] for part, _ in kind.parts}
    if kind.module == "llm" and kind.is_last:
        # Backward comes to the layers when the head has given up what it kept (an encoder's output stays).
        each |= {part: own + -1.0 * kept["last"] for part, own in each.items() if part != "last"}
    return kind.total(kept), list(each.values())
