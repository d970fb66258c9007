"""What is still on a device of what waits in host memory: saved tensors of offloaded layers, and the optimiser's state.

A stage offloads its first layers. Their copies follow one another, and are spread evenly over the layers of a forward:
of 28 layers, the tensors of layers 0, 1 and 2 have left behind layers 9, 18 and 26. Backward takes the same way back.

An offloaded optimiser state comes part by part to be updated, and two parts are on the device: one is copied while the
other is updated.
"""

from functools import lru_cache
from typing import TypeVar

import numpy as np

__all__ = ["leaves_behind", "most_hidden", "most_still_here", "values_of_part"]

Number = TypeVar("Number", float, np.ndarray)
# A copy of 16 MiB takes all of a link.
_MOST_VALUES, _ALIGNED = 1 << 22, 64


@lru_cache(maxsize=4096)
def leaves_behind(num_offloaded: int, num_layers: int) -> tuple[int, ...]:
    """For each of the first `num_offloaded` layers of a stage: at the end of which layer its tensors have left."""
    between = max(0, num_layers - 2)
    return tuple(
        min(num_layers - 1, max(place + 1, -(-(place + 1) * between // num_offloaded)))
        for place in range(num_offloaded)
    )


@lru_cache(maxsize=4096)
def most_still_here(num_offloaded: int, num_layers: int, since: int = 0) -> int:
    """The most offloaded layers whose tensors are on the device at a time while backward is in an offloaded layer, the
    one itself included; or, with `since`, in a layer from that one on."""
    ends = leaves_behind(num_offloaded, num_layers)
    at = range(since, num_layers) if since else range(num_offloaded)
    return max((sum(place <= layer <= end for place, end in enumerate(ends)) for layer in at), default=0)


def most_hidden(num_layers: int, copy_of_forward: float) -> int:
    """How many layers a stage can offload while computing hides their copies, where the copy of one layer's tensors
    takes `copy_of_forward` times as long as its forward."""
    return max(0, min(num_layers - 2, int((num_layers - 2) / copy_of_forward)))


def values_of_part(num_values: Number) -> Number:
    """How many of the `num_values` that an offloaded optimiser updates are in each of its two parts on the device."""
    return np.minimum(_MOST_VALUES, np.ceil(num_values / (2 * _ALIGNED)) * _ALIGNED)
