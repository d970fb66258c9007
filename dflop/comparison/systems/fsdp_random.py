"""Fully sharded data parallelism, with batches as torch's DistributedSampler deals them.

Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB '23.
"""

from dflop.balancing import dealt_at_random
from dflop.comparison.system import Batch, System, fastest_of
from dflop.planning import whole_on_every_device
from dflop.pricing import Assignment

__all__ = ["SYSTEM"]


def _decide(batch: Batch) -> Assignment:
    return batch.of_buckets(dealt_at_random(len(batch.shapes), batch.plan.num_buckets, batch.rng))


SYSTEM = System(name="FSDP, random", plans=fastest_of(whole_on_every_device, grouping="random"), decide=_decide)
