"""What an optimiser's step reads and writes in a device's memory. It computes so little that this is its time."""

from typing import TypeVar

import numpy as np

__all__ = ["update_bytes"]

Bytes = TypeVar("Bytes", float, np.ndarray)

# How often a step touches a value that a rank updates: AdamW reads and writes it and its two moments, and reads its
# gradient. Before that, the norm reads the gradient, and scaling it reads and writes it.
_TOUCHES = 7 + 1 + 2


def update_bytes(trained_bytes: Bytes, dp: int, *, value_bytes: int, num_shards: int = 1) -> Bytes:
    """Bytes that a rank reads and writes to update its part of a stage with `dp` replicas and so many bytes of trained
    parameters in fp32.

    Who updates what is as in `resident_parts`. Where masters are separate, they are read once more, and written as the
    parameters that are computed with. Replicas that do not shard the parameters set all gradients to zero before a
    step.
    """
    count, held_bytes = trained_bytes / 4, max(4, value_bytes)
    touched = _TOUCHES * held_bytes
    if num_shards > 1:
        return count / num_shards * touched
    if value_bytes < held_bytes:
        touched += held_bytes + value_bytes
    return count / dp * touched + count * held_bytes
