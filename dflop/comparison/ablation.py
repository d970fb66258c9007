"""Where the advantage comes from: Megatron-style training with one part of ours added, and ours with one part removed.

Parts are the *plan* (placement and grids), the *balance* of samples over buckets, the *order* of a replica's
microbatches, the pipeline *schedule*, and the *sharding* of parameters among replicas. A row "only X" has nothing else
of ours: the encoder is in the LLM's first stage, both have one grid, with 1F1B, sharded optimiser states and samples
grouped at random; "only order" sorts the microbatches of random groups. A row "without X" has all parts but one. Each
row has the fastest plan of its space. Balance and order are the quick ones, without our final step search.
"""

import numpy as np

from dflop.balancing import dealt_at_random, lpt_buckets, small_at_both_ends
from dflop.comparison.system import Batch, System, fastest_of
from dflop.comparison.systems import megatron
from dflop.config import PlanConfig
from dflop.parallelism import MONOLITHIC, PLAIN_SCHEDULE, PLAIN_SHARDING
from dflop.pricing import Assignment

__all__ = ["ABLATION"]

_MONOLITHIC = {"placements": [MONOLITHIC.name]}
_PLAIN = {"schedules": [PLAIN_SCHEDULE]}
_UNSHARED = {"shardings": [PLAIN_SHARDING]}


def _random(batch: Batch) -> Assignment:
    return batch.of_buckets(_drawn(batch))


def _random_ordered(batch: Batch) -> Assignment:
    return batch.of_buckets(_in_order(batch, _drawn(batch)))


def _balanced(batch: Batch) -> Assignment:
    return batch.of_buckets(lpt_buckets(batch.problem))


def _balanced_ordered(batch: Batch) -> Assignment:
    return batch.of_buckets(_in_order(batch, lpt_buckets(batch.problem)))


def _drawn(batch: Batch) -> np.ndarray:
    return dealt_at_random(len(batch.shapes), batch.plan.num_buckets, batch.rng)


def _in_order(batch: Batch, bucket: np.ndarray) -> np.ndarray:
    """The same buckets, renumbered so that each replica's small ones come first and last."""
    loads_s = np.bincount(bucket, weights=batch.problem.loads_s.sum(axis=1), minlength=batch.plan.num_buckets)
    place = np.empty((batch.plan.grid("llm").dp, batch.plan.num_microbatches), dtype=np.int64)
    for rank, own_s in enumerate(loads_s.reshape(place.shape)):
        place[rank, small_at_both_ends(own_s)] = rank * place.shape[1] + np.arange(place.shape[1])
    return place.ravel()[bucket]


def _only(part: str, decide=_random, **more: list[str]) -> System:
    """Megatron-style training, except for `decide` and the keys of `PlanConfig` in `more`."""
    within = PlanConfig(**{**_MONOLITHIC, **_PLAIN, **_UNSHARED, **more})
    grouping = "random" if decide in (_random, _random_ordered) else "balanced"
    is_plan = within.placements != _MONOLITHIC["placements"]
    return System(
        name=f"only {part}",
        plans=fastest_of(within, grouping=grouping, splits_evenly=not is_plan),
        decide=decide,
    )


def _without(part: str, decide=_balanced_ordered, *, splits_evenly: bool = False, **less: list[str]) -> System:
    """Our training, except for `decide` and the keys of `PlanConfig` in `less`."""
    grouping = "random" if decide is _random_ordered else "balanced"
    plans = fastest_of(PlanConfig(**less), grouping=grouping, splits_evenly=splits_evenly)
    return System(name=f"without {part}", plans=plans, decide=decide)


_ALL = PlanConfig()

ABLATION: tuple[System, ...] = (
    megatron.SYSTEM,
    _only("plan", placements=_ALL.placements),
    _only("balance", _balanced),
    _only("order", _random_ordered),
    _only("schedule", schedules=_ALL.schedules),
    _only("sharding", shardings=_ALL.shardings),
    _without("plan", splits_evenly=True, **_MONOLITHIC),
    _without("balance", _random_ordered),
    _without("order", _balanced),
    _without("schedule", **_PLAIN),
    _without("sharding", **_UNSHARED),
)
