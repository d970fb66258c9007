"""Whether a collator pads batches: the cost of a batch depends on it, and collators have no attribute that tells it."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch

from dflop.base import UserError

__all__ = ["pads_batches"]


def pads_batches(collator: Callable[[list[Any]], Any], dataset: Any) -> bool:
    """Whether a collator pads each batch to its longest sample.

    The collator is called with the dataset's first sample twice: two rows of `input_ids` are a padded batch, one row
    is a packed one (`DataCollatorWithFlattening`). The state of torch's random numbers is restored, so that a collator
    that masks at random does not change the training.

    Raises:
        UserError: the batch has no `input_ids` of either shape.
    """
    samples = [copy(dataset[0]), copy(dataset[0])]  # a collator may take labels out
    with torch.random.fork_rng(devices=[]):
        batch = collator(samples)
    shape = (
        tuple(getattr(batch["input_ids"], "shape", ())) if isinstance(batch, Mapping) and "input_ids" in batch else ()
    )
    if len(shape) >= 2 and shape[0] == len(samples):
        return True
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1):
        return False
    name = getattr(collator, "__name__", type(collator).__name__)
    raise UserError(
        f"whether the collator {name} pads cannot be seen from what it makes of two samples: they should have "
        "`input_ids` of shape [2, longest] where it pads, [1, tokens of both] where it packs; say so yourself with "
        "padded=True (a batch costs its number of samples times the longest) or padded=False (costs add up)"
    )
