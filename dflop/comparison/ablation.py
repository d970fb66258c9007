"""Where the advantage comes from: Megatron-style training with one part of ours added, and ours with one part removed.

Parts are the *plan* (placement and grids), the *balance* of samples over buckets, the *order* of a replica's
microbatches, the pipeline *schedule*, and the *sharding* of parameters among replicas. A row "only X" has nothing else
of ours: the encoder is in the LLM's first stage, both have one grid, with 1F1B, sharded optimiser states and samples
grouped at random; "only order" sorts the microbatches of random groups. A row "without X" has all parts but one. Each
row has the fastest plan of its space. Balance and order are the quick ones, without our final step search. In no row
do replicas share samples; the last has all parts but that one. "Without kept attention" recomputes layers as a whole
alone, as Megatron-style training does.
"""

import numpy as np

from dflop.balance import LPT, RANDOM, BatchProblem, DrawnBatch, Policy, small_at_both_ends
from dflop.comparison.system import System, bucket_numbers, fastest_of
from dflop.comparison.systems import megatron
from dflop.config import PlanConfig
from dflop.plan import MONOLITHIC, PLAIN_SCHEDULE, PLAIN_SHARDING

__all__ = ["ABLATION", "LPT_ORDERED"]

_MONOLITHIC = {"placements": [MONOLITHIC.name]}
_PLAIN = {"schedules": [PLAIN_SCHEDULE]}
_UNSHARED = {"shardings": [PLAIN_SHARDING]}


class _Ordered(Policy):
    """The groups of another policy, renumbered so that each replica's small ones come first and last."""

    def __init__(self, of: Policy) -> None:
        self.name, self._of = f"{of.name}, ordered", of

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        bucket = self._of.buckets(problem, rng)
        loads_s = np.bincount(bucket, weights=problem.loads_s.sum(axis=1), minlength=problem.num_buckets)
        loads_s = loads_s.reshape(problem.num_dp_ranks, problem.num_microbatches)
        places = [np.argsort(small_at_both_ends(of_rank_s)) for of_rank_s in loads_s]
        rank, microbatch = np.divmod(bucket, problem.num_microbatches)
        return bucket_numbers(rank, np.array(places)[rank, microbatch], problem.num_microbatches)

    def quick(self, drawn: DrawnBatch, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        return self._of.quick(drawn, dp, num_microbatches)


LPT_ORDERED, _RANDOM_ORDERED = _Ordered(LPT), _Ordered(RANDOM)
# Of these, samples stay in the groups that are drawn, whether they fit or not (`System.moves_samples`).
_DRAWN = RANDOM, _RANDOM_ORDERED


def _only(part: str, policy: Policy = RANDOM, **more: list[str]) -> System:
    """Megatron-style training, except for `policy` and the keys of `PlanConfig` in `more`."""
    within = PlanConfig(**{**_MONOLITHIC, **_PLAIN, **_UNSHARED, **more})
    is_plan = within.placements != _MONOLITHIC["placements"]
    plans = fastest_of(within, policy=policy, splits_evenly=not is_plan)
    return System(name=f"only {part}", plans=plans, policy=policy, moves_samples=policy not in _DRAWN)


def _without(
    part: str,
    policy: Policy = LPT_ORDERED,
    *,
    splits_evenly: bool = False,
    keeps_attention: bool = True,
    **less: list[str],
) -> System:
    """Our training, except for `policy` and the keys of `PlanConfig` in `less`."""
    plans = fastest_of(PlanConfig(**less), policy=policy, splits_evenly=splits_evenly, keeps_attention=keeps_attention)
    return System(name=f"without {part}", plans=plans, policy=policy, moves_samples=policy not in _DRAWN)


_ALL = PlanConfig()

ABLATION: tuple[System, ...] = (
    megatron.SYSTEM,
    _only("plan", placements=_ALL.placements),
    _only("balance", LPT),
    _only("order", _RANDOM_ORDERED),
    _only("schedule", schedules=_ALL.schedules),
    _only("sharding", shardings=_ALL.shardings),
    _without("plan", splits_evenly=True, **_MONOLITHIC),
    _without("balance", _RANDOM_ORDERED),
    _without("order", LPT),
    _without("schedule", **_PLAIN),
    _without("sharding", **_UNSHARED),
    _without("kept attention", keeps_attention=False),
    _without("shared samples"),
)
