"""verl's balancing: FSDP, and the largest differencing method of Karmarkar and Karp on the lengths of samples.

Sheng et al., "HybridFlow: a flexible and efficient RLHF framework", EuroSys '25, and verl's documentation
(`balance_batch`); Karmarkar and Karp, "The differencing method of set partitioning", 1982. A sample's length is the
number of its LLM tokens; the encoders' work does not count.
"""

from dflop.comparison.packing import differencing
from dflop.comparison.system import Batch, System, fastest_of
from dflop.comparison.systems.fsdp_random import whole_on_every_device
from dflop.pricing import Assignment

__all__ = ["SYSTEM"]


def _decide(batch: Batch) -> Assignment:
    return batch.of_buckets(differencing(batch.shapes.llm_tokens, batch.plan.num_buckets))


SYSTEM = System(name="FSDP, Karmarkar-Karp", plans=fastest_of(whole_on_every_device), decide=_decide)
