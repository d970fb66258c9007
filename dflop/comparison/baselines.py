"""The baselines of `plan.yaml`: some of the systems, on the batches that plans are priced on.

Batches are grouped as in the search of a system's plans, by the quick form of a policy. Our plan's price is made in the
same way, without the scheduler, so the two can be compared.
"""

from dflop.base import UserError
from dflop.comparison.systems import baseline_systems
from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.search import Baseline
from dflop.shapes import SampleShapes

__all__ = ["price_baselines"]


def price_baselines(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> list[Baseline]:
    """All baselines, each with the fastest plan of its kind. `plan.fixed` does not limit them."""
    found = []
    for system in baseline_systems(config):
        try:
            plans = system.plans(config, spec, costs, samples, compares=False)
        except UserError as error:
            found.append(Baseline(name=system.baseline, priced=None, why_not=str(error)))
        else:
            found.append(Baseline(name=system.baseline, priced=plans[0] if plans else None))
    return found
