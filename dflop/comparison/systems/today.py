"""The layout that the user trains with today, as `plan.today` of the config gives it, with batches as they are drawn.

A placement, schedule or sharding that it leaves open is that of most frameworks. Of the remaining plans, the fastest
counts. `plan.yaml` has the same layout as a baseline.
"""

from dflop.comparison.system import System, offered
from dflop.comparison.systems import megatron
from dflop.config import Config
from dflop.costs import CostModel
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism import Plan
from dflop.planning import search_todays_layout

__all__ = ["SYSTEM"]


def _plans(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> list[Plan]:
    return offered(search_todays_layout(config, spec, costs, samples, compares=True))


SYSTEM = System(name="today's layout, random", plans=_plans, decide=megatron.SYSTEM.decide)
