"""From which load on a layer takes longer: smaller microbatches take as long as that one."""

import numpy as np

from dflop.costs.model import CostModel
from dflop.models.loads import FEATURES, Loads, main_load
from dflop.plan.layout_key import LayoutKey

__all__ = ["launch_bound_load"]

# Times within this ratio count as equal, and loads over a smaller range than this ratio show nothing.
_SAME_TIME, _LEAST_RANGE = 1.25, 2.0
_NUM_LOADS = 200


def launch_bound_load(costs: CostModel, module: str, layout: LayoutKey) -> float | None:
    """The load (items of encoders, tokens of the LLM) below which a layer's forward and backward take the same time,
    within a quarter: launching kernels and reading weights bound it. None where time falls with the load down to the
    least measured one.

    Squares of segments are left out, which matter only in large microbatches.
    """
    bounds, along = costs.ranges.get((module, layout, False)), FEATURES.index(main_load(module))
    if bounds is None or bounds.least[along] <= 0:
        return None
    loads = np.zeros((len(FEATURES), _NUM_LOADS))
    loads[along] = np.geomspace(bounds.least[along], bounds.most[along], _NUM_LOADS)
    forward, backward = costs.part_times(module, layout, Loads(*loads), ("layer",))
    seconds = forward["layer"] + backward["layer"]
    found = float(loads[along][seconds <= _SAME_TIME * seconds[0]][-1])
    return found if found >= _LEAST_RANGE * bounds.least[along] else None
