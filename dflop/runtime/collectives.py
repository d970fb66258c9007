"""torch's collectives on one flat tensor, under the name that the installed version has for them: the one of torch
before 2.13 is announced to go, in a warning for each call of a user's run."""

import torch
import torch.distributed as dist

__all__ = ["all_gather_flat", "reduce_scatter_flat"]

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_flat(own: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `values` [num_ranks * size] over the group's ranks; each gets its part in `own` [size]."""
    _reduce_scatter(own, values, group=group)


def all_gather_flat(values: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Each rank's `own` [size], one after the other, in everybody's `values` [num_ranks * size]."""
    _all_gather(values, own, group=group)
