"""The one all-reduce of numbers in a step: sums of a few values over all ranks, and each rank's own numbers."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["sum_over_ranks"]


def sum_over_ranks(
    values: Mapping[str, float], of_rank: Sequence[float], device: torch.device
) -> tuple[dict[str, float], np.ndarray]:
    """The sums of `values` over all ranks, by name, and all ranks' `of_rank`, float64 [num_ranks,
    len(of_rank)]; every rank must call this."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    of_ranks = np.zeros((num_ranks, len(of_rank)))
    of_ranks[rank] = of_rank
    told = torch.from_numpy(np.concatenate([list(values.values()), of_ranks.ravel()])).to(device)
    dist.all_reduce(told)
    summed = told.cpu().numpy()
    return dict(zip(values, summed[: len(values)].tolist(), strict=True)), summed[len(values) :].reshape(num_ranks, -1)
