"""What a stage holds on a rank: what follows from its parts' bytes, and from its parameters'."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from dflop.costs.stage_kind import StageKind

__all__ = ["StageMemory", "memory_of_parts", "resident_bytes"]


class StageMemory(NamedTuple):
    """Bytes of one stage on one rank: what each microbatch in flight keeps, and what comes on top of that while the
    microbatch is computed."""

    activation_bytes: np.ndarray
    transient_bytes: np.ndarray


Bytes = TypeVar("Bytes", float, np.ndarray)


def resident_bytes(parameter_bytes: Bytes, dp: int, *, is_frozen: bool, num_shards: int = 1) -> Bytes:
    """What a rank always holds of a stage with so many replicas: parameters and gradients, and its share of AdamW's two
    moments (fp32 each); of a frozen stage parameters alone.

    Where parameters are divided among `num_shards` of the replicas, so is everything else."""
    own = parameter_bytes / num_shards
    return own if is_frozen else own * (2 + 2 / (dp if num_shards == 1 else 1))


def memory_of_parts(
    kind: StageKind, kept: Mapping[str, np.ndarray], passing: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """What a stage's microbatch keeps, and what each of its parts in turn needs on top of that.

    `kept` and `passing` are of each part once: bytes at some loads, or lines [..., 5] (`Coefficients.lines`).
    """
    freed: np.ndarray | float = 0.0
    if kind.module == "llm" and kind.is_last:
        # Backward comes to the layers when the head has given up what it kept (an encoder's output stays).
        freed = kept["last"]
    return kind.total(kept), [passing[part] - (0.0 if part == "last" else freed) for part, _ in kind.parts]
