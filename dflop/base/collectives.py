"""torch's collectives on one flat tensor, by the names that the installed version of torch has for them.

torch 2.13 renamed these functions. It warns at every call that uses an old name, in the output of a user's run.
"""

import torch
import torch.distributed as dist

__all__ = ["all_gather_flat", "reduce_scatter_flat"]

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_flat(part: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum `values` [num_ranks * size] over the group's ranks; each gets its share in `part` [size]. Both may
    be used again behind the result's `wait()`."""
    return _reduce_scatter(part, values, group=group, async_op=True)


def all_gather_flat(values: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to put each rank's `part` [size], one after the other, into everybody's `values` [num_ranks * size]. Both
    may be used again behind the result's `wait()`."""
    return _all_gather(values, part, group=group, async_op=True)
