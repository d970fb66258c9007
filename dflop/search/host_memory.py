"""Plans with layers whose saved tensors wait in host memory, as many as the links carry while devices compute.

Copies of a layer of Qwen2-7B take 2.3 times its forward on an H100, so of 28 layers 10 can be offloaded while the
others hide it (`plan.leaving`). Such layers take no memory at a device's peak, and nothing is computed again for them.
This is searched only where the plan found without it recomputes layers, or where none was found. First the whole space
is searched with layers that keep less: all layers of a module share in what its offloaded ones save. Then the fastest
plans are priced with offloaded layers, no more than they need, and with recomputed ones if they need these as well.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dflop.balance import LPT
from dflop.config import Config, host_bytes_per_s
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.models.loads import Loads
from dflop.plan import Plan
from dflop.plan.layout_key import LayoutKey
from dflop.plan.leaving import most_hidden
from dflop.schedule import loads_of
from dflop.search.best_first import FINALISTS_PERCENT, NUM_FINALISTS, SearchResult
from dflop.search.candidate import Candidate, PlanPricer
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.levels import without_recomputed
from dflop.search.recompute import JustEnough

__all__ = ["search_offloading"]

# The share of a link's bandwidth that plans count on: some microbatches have less to compute for each byte than others.
_LINK_SHARE = 0.9
# The most that can be offloaded is offloaded, or so many fewer eighths of it.
_PARTS = 8


def search_offloading(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    batches: GroupedBatches,
    found: SearchResult | None,
    search: Callable[[CostModel], SearchResult | None],
) -> SearchResult | None:
    """What was `found`, with plans that offload layers if these are faster. `search` searches with other costs.

    Raises:
        UserError: if the data sheet of the cluster's devices is not known, or nothing was found and nothing fits.
    """
    offloading = _Offloading(config, spec, costs, batches)
    if found and not found.best.plan.checkpointing:
        return found
    own = search(offloading.lighter_costs())
    if own is None:
        return found
    most_s = (1 + FINALISTS_PERCENT / 100) * own.candidates[0].step_s
    near = [candidate.plan for candidate in own.candidates[:NUM_FINALISTS] if candidate.step_s <= most_s]
    candidates = sorted(filter(None, map(offloading.candidate, near)), key=lambda candidate: candidate.step_s)
    if not candidates or (found and candidates[0].step_s >= found.candidates[0].step_s):
        return found
    own = replace(own, candidates=candidates, larger=None)
    return found.merged(own) if found else own


class _Offloading:
    """Which layers plans can offload, on devices of the config's cluster."""

    def __init__(self, config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches) -> None:
        self._config, self._spec, self._costs, self._batches = config, spec, costs, batches
        self._trained = config.model.trained.among(spec.modules)
        self._limit_bytes = config.cluster.memory_gib * 2**30
        self._host_bytes = config.cluster.host_memory_gib * 2**30 / config.cluster.devices_per_node
        self._enough = JustEnough(spec, config.model.trained, self._limit_bytes)
        self._bytes_per_s = _LINK_SHARE * host_bytes_per_s(config.cluster)
        # By module and layout: how many times a layer's forward the copies of its saved tensors take.
        self._copy_of_forward = {
            (module.name, layout): self._ratio(module.name, layout)
            for module in spec.modules
            for layout in costs.layouts[module.name]
        }

    def _ratio(self, module: str, layout: LayoutKey) -> float:
        """Of a device's share of the first batch."""
        own = loads_of(module, self._batches.shapes[0])
        loads = Loads(*(np.array([load.sum() / self._config.cluster.num_devices]) for load in own))
        forward, _ = self._costs.part_forms(module, layout)
        kept_bytes = self._costs.activations[module, layout, "layer", False](loads)
        forward_s = forward["layer"](loads)
        return float(np.divide(kept_bytes / self._bytes_per_s, forward_s)[0]) if forward_s[0] > 0 else np.inf

    def lighter_costs(self) -> CostModel:
        """The costs, with layers that keep the less the more of their module can be offloaded."""
        activations = dict(self._costs.activations)
        for (module, layout), ratio in self._copy_of_forward.items():
            ways = self._trained.ways(module)
            if num_layers := len(ways.layers) - ways.num_still:
                share = most_hidden(num_layers, ratio) / num_layers
                activations[module, layout, "layer", False] = (1 - share) * activations[module, layout, "layer", False]
        return replace(self._costs, activations=activations)

    def candidate(self, plan: Plan) -> Candidate | None:
        """The plan with as few offloaded layers as it fits with, and recomputed ones where all are not enough; None
        where it does not fit."""
        plan = without_recomputed(plan)
        parts = _PARTS
        while self._pricer(plan, parts).host_bytes() > self._host_bytes:
            parts -= 1  # with none, nothing is in host memory
        while parts and self._pricer(plan, parts - 1).needed_bytes(np.inf) <= self._limit_bytes:
            parts -= 1
        pricer = self._pricer(plan, parts)
        if pricer.needed_bytes() > self._limit_bytes:
            pricer = self._enough.of(pricer)
        if pricer is None:
            return None
        return replace(pricer.candidate(), bottleneck="memory")

    def _pricer(self, plan: Plan, parts: int) -> PlanPricer:
        plan = self._with_offloaded(plan, parts)
        return PlanPricer(plan, self._config, self._spec, self._costs, self._batches, LPT)

    def _with_offloaded(self, plan: Plan, parts: int) -> Plan:
        grids = []
        for grid in plan.grids:
            ways, ratio = self._trained.ways(grid.module), self._copy_of_forward[grid.module, grid.layout]
            stages = plan.layers_of(grid.module, self._spec.module(grid.module).num_layers)
            counts = [most_hidden(len(own) - ways.within(own).num_still, ratio) * parts // _PARTS for own in stages]
            grids.append(replace(grid, offloaded=tuple(counts) if any(counts) else ()))
        return replace(plan, grids=tuple(grids))
