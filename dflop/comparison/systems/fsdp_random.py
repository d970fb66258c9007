"""Fully sharded data parallelism, with batches as torch's DistributedSampler deals them.

Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB '23. Every device computes the
whole model on its own samples. Parameters, gradients and moments are sharded over all devices, or inside each node
where that is faster (`costs.sharded`).
"""

from dflop.balance import RANDOM
from dflop.comparison.system import System, fastest_of
from dflop.config import FixedGrid, FixedPlan, PlanConfig
from dflop.models import ModelSpec
from dflop.plan import MONOLITHIC, PLAIN_SCHEDULE, SHARDINGS

__all__ = ["SYSTEM", "whole_on_every_device"]


def whole_on_every_device(spec: ModelSpec) -> PlanConfig:
    """The limits of the search space for fully sharded data parallelism."""
    whole = {module.name: FixedGrid(tp=1, pp=1) for module in spec.modules}
    return PlanConfig(
        placements=[MONOLITHIC.name],
        schedules=[PLAIN_SCHEDULE],
        shardings=[name for name, sharding in SHARDINGS.items() if sharding.gathers],
        fixed=FixedPlan(modules=whole),
    )


SYSTEM = System(
    name="FSDP, random",
    baseline="every device the whole model, random batches (FSDP-style)",
    plans=fastest_of(whole_on_every_device, policy=RANDOM),
    policy=RANDOM,
    moves_samples=False,
)
