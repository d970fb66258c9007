"""Fully sharded data parallelism, with samples of like length in a microbatch.

This is `group_by_length` of the Hugging Face Trainer, but within a global batch, so that each step trains on the same
samples as with the other systems.
"""

from dflop.comparison.system import Batch, System, bucket_numbers, fastest_of
from dflop.comparison.systems.fsdp_random import whole_on_every_device
from dflop.planning import like_lengths
from dflop.pricing import Assignment

__all__ = ["SYSTEM"]


def _decide(batch: Batch) -> Assignment:
    num_microbatches = batch.plan.num_microbatches
    places = like_lengths(batch.shapes.llm_tokens, batch.plan.grid("llm").dp, num_microbatches)
    return batch.of_buckets(bucket_numbers(*places, num_microbatches))


SYSTEM = System(
    name="FSDP, length-grouped",
    baseline="every device the whole model, length-grouped batches (FSDP-style)",
    plans=fastest_of(whole_on_every_device, grouping="by_length"),
    decide=_decide,
)
