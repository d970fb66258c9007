"""Plans of which a part waits in host memory: saved tensors of layers, and the optimiser's state.

Copies of a layer of Qwen2-7B take 2.7 times its forward on an H100, so of 28 layers 9 can be offloaded while all of
them hide it (`plan.leaving`). When the last layer computes, the device holds nothing of these, and nothing is computed
again for them. The optimiser's state comes to be updated at the end of a step, and goes again: nothing hides that, but
a step moves it once. Of 78 B parameters on 64 devices, 9.1 GiB of a device wait, and are moved in 0.4 s.

Both are searched only where memory makes plans slower, or where nothing fits. First the whole space is searched with
layers that keep less: all layers of a module share in what its offloaded ones save. Then the fastest plans, and those
found before, are priced with offloaded layers, no more than they need, and with recomputed ones if they need these as
well. Where the fastest still recomputes, all of that is done once more for plans whose optimiser is offloaded.
"""

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import numpy as np

from dflop.balance import LPT
from dflop.base import UserError
from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.models.loads import Loads, main_load
from dflop.plan import Plan
from dflop.plan.layout_key import LayoutKey
from dflop.plan.leaving import most_hidden
from dflop.schedule import loads_of, to_host_bytes_per_s
from dflop.search.best_first import FINALISTS_PERCENT, NUM_FINALISTS, WORTH_IT, SearchResult
from dflop.search.candidate import Candidate, PlanPricer
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.levels import without_recomputed
from dflop.search.recompute import JustEnough

__all__ = ["may_offload", "search_offloading"]

# The share of a link's bandwidth that plans count on. Some microbatches have less to compute for each byte than others,
# and the forward of a layer took an H200 0.85 of what its data sheet predicts.
_LINK_SHARE = 0.8
# The most that can be offloaded is offloaded, or so many fewer eighths of it.
_PARTS = 8


class _Search(Protocol):
    """Searches with other costs."""

    def __call__(self, costs: CostModel, *, offloads_optimizer: bool) -> SearchResult | None: ...


def may_offload(config: Config) -> bool:
    """Whether a part of plans may wait in host memory."""
    is_pinned = config.plan.fixed is not None and config.plan.fixed.checkpointing is not None
    return config.cluster.host_memory_gib is not None and not is_pinned


def search_offloading(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    batches: GroupedBatches,
    found: SearchResult | None,
    search: _Search,
) -> SearchResult | None:
    """What was `found`, with plans that keep a part in host memory if these are faster; None where nothing fits.

    Raises:
        UserError: if links to the host were not measured, and no data sheet of the cluster's devices says how fast they
            are.
    """
    if found and not found.candidates[0].plan.checkpointing and found.larger is None:
        return found  # nor would more memory bring anything
    offloading, results = _Offloading(config, spec, costs, batches), [found] if found else []
    candidates, num_priced = list(found.candidates) if found else [], found.num_priced if found else 0
    for offloads_optimizer in (False, True):
        with suppress(UserError):  # nothing fits
            if result := search(offloading.lighter_costs(), offloads_optimizer=offloads_optimizer):
                results.append(result)
        plans = dict.fromkeys(
            replace(without_recomputed(own.plan), offloads_optimizer=offloads_optimizer)
            for own in itertools.chain.from_iterable(map(_fastest, results))
        )
        least_s = candidates[0].step_s if candidates else np.inf
        faster = [own for own in map(offloading.candidate, plans) if own and own.step_s < least_s]
        candidates = sorted([*candidates, *faster], key=lambda candidate: candidate.step_s)
        num_priced += len(plans)
        if candidates and not candidates[0].plan.checkpointing:
            break  # the optimiser's copies would take longer, and nothing less
    if not candidates or (found and candidates[0] is found.candidates[0]):
        return found
    like = found or results[0]
    larger = like.larger if found and like.larger and WORTH_IT * like.larger.step_s < candidates[0].step_s else None
    return replace(like, candidates=candidates, num_priced=num_priced, larger=larger, with_more=None)


def _fastest(result: SearchResult) -> list[Candidate]:
    """The plans that are nearly as fast as the fastest."""
    most_s = (1 + FINALISTS_PERCENT / 100) * result.candidates[0].step_s
    return [own for own in result.candidates[:NUM_FINALISTS] if own.step_s <= most_s]


class _Offloading:
    """Which layers plans can offload, on devices of the config's cluster."""

    def __init__(self, config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches) -> None:
        self._config, self._spec, self._costs, self._batches = config, spec, costs, batches
        self._trained = config.model.trained.among(spec.modules)
        self._limit_bytes = config.cluster.memory_gib * 2**30
        self._host_bytes = config.cluster.host_memory_gib * 2**30 / config.cluster.devices_per_node
        self._enough = JustEnough(spec, config.model.trained, self._limit_bytes)
        self._bytes_per_s = _LINK_SHARE * to_host_bytes_per_s(costs.links, config.cluster)
        # By module and layout: how many times a layer's forward the copies of its saved tensors take.
        self._copy_of_forward = {
            (module.name, layout): self._ratio(module.name, layout)
            for module in spec.modules
            for layout in costs.layouts[module.name]
        }

    def _ratio(self, module: str, layout: LayoutKey) -> float:
        """Of a device's share of the mean batch."""
        batches = [loads_of(module, shapes) for shapes in self._batches.shapes]
        num_shares = len(batches) * self._config.cluster.num_devices
        loads = Loads(*(np.array([sum(map(np.sum, column)) / num_shares]) for column in zip(*batches, strict=True)))
        if not getattr(loads, main_load(module))[0]:
            return np.inf
        forward, _ = self._costs.part_forms(module, layout)
        kept_bytes = self._costs.activations[module, layout, "layer", False](loads)
        return float((kept_bytes / self._bytes_per_s / forward["layer"](loads))[0]) or np.inf

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
        """The plan, which recomputes nothing, with as few offloaded layers as it fits with, and with recomputed ones
        where all are not enough; None where it does not fit or offloads nothing."""
        nothing = PlanPricer(plan, self._config, self._spec, self._costs, self._batches, LPT)

        def offloading(parts: int) -> PlanPricer:
            return nothing.recomputing(self._with_offloaded(plan, parts))

        parts = _PARTS
        while offloading(parts).host_bytes() > self._host_bytes:
            if not parts:
                return None  # the optimiser's state alone is too much
            parts -= 1
        while parts and offloading(parts - 1).needed_bytes() <= self._limit_bytes:
            parts -= 1
        pricer = offloading(parts)
        if pricer.needed_bytes() > self._limit_bytes:
            pricer = self._enough.of(pricer)
        if pricer is None or not pricer.plan.offloads:
            return None
        return replace(pricer.candidate(), bottleneck="memory")

    def _with_offloaded(self, plan: Plan, parts: int) -> Plan:
        grids = []
        for grid in plan.grids:
            ways, ratio = self._trained.ways(grid.module), self._copy_of_forward[grid.module, grid.layout]
            stages = plan.layers_of(grid.module, self._spec.module(grid.module).num_layers)
            counts = [most_hidden(len(own) - ways.within(own).num_still, ratio) * parts // _PARTS for own in stages]
            grids.append(replace(grid, offloaded=tuple(counts) if any(counts) else ()))
        return replace(plan, grids=tuple(grids))
