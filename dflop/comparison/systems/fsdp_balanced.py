"""Fully sharded data parallelism with our own batch sampler (`dflop.balancing.sampler`), which any trainer can use.

Replicas wait for each other in every layer, so each microbatch is balanced on its own, over all modules at once. The
sampler gives all microbatches equally many samples. Where a batch cannot be divided so, `lpt_buckets` packs it.
"""

import numpy as np

from dflop.balancing import balanced_cells, lpt_buckets
from dflop.comparison.system import Batch, System, bucket_numbers, fastest_of
from dflop.comparison.systems.fsdp_random import whole_on_every_device
from dflop.pricing import Assignment

__all__ = ["SYSTEM"]


def _decide(batch: Batch) -> Assignment:
    dp, num_microbatches = batch.plan.grid("llm").dp, batch.plan.num_microbatches
    size, rest = divmod(len(batch.shapes), dp * num_microbatches)
    if rest:
        return batch.of_buckets(lpt_buckets(batch.problem))
    cell = balanced_cells(batch.problem.loads_s, dp, size)
    microbatch, rank = np.divmod(cell, dp)
    return batch.of_buckets(bucket_numbers(rank, microbatch, num_microbatches))


SYSTEM = System(
    name="FSDP, balanced by our sampler",
    baseline="every device the whole model, balanced batches (FSDP-style)",
    plans=fastest_of(whole_on_every_device),
    decide=_decide,
)
