"""What a plan's ranks hold: parameters, gradients and optimiser state, and the microbatches in flight.

A worker is a group of ranks that act together (`pipeline.layout`); all of its ranks hold as much. Which batches fit is
asked of `memory_limit`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from dflop.config import ClusterConfig
from dflop.costs import Loads
from dflop.parallelism import PLACEMENTS
from dflop.pipeline import CompiledPlan, peak_bytes
from dflop.pricing.assignment import Cells
from dflop.pricing.edge_bytes import EdgeBytes
from dflop.pricing.stage_costs import StageCosts
from dflop.runtime import UserError

__all__ = ["PlanMemory"]

# Of a bucket's tokens, how many are learned, and in how many samples they come, where nobody says.
_TARGET_SHARE = 0.25
_SAMPLES_A_BUCKET = 4


class PlanMemory:
    """Bytes of one plan's devices."""

    def __init__(
        self, stage_costs: StageCosts, compiled: CompiledPlan, cluster: ClusterConfig, edge_bytes: EdgeBytes
    ) -> None:
        self._stage_costs, self._compiled, self._cluster = stage_costs, compiled, cluster
        self._plan, self._costs, self._edge_bytes = stage_costs.plan, stage_costs.costs, edge_bytes

    @property
    def limit_bytes(self) -> float:
        """What a device has."""
        return self._cluster.memory_gib * 2**30

    @property
    def tensor_limit_bytes(self) -> float:
        """What a process can have of tensors, so that it holds no more than the limit."""
        return (self.limit_bytes - self._costs.overhead_bytes) / (1 + self._costs.allocator_share)

    def held_bytes(self, tensor_bytes: np.ndarray) -> np.ndarray:
        """What a process with such tensors holds."""
        return self._costs.overhead_bytes + tensor_bytes * (1 + self._costs.allocator_share)

    def of_modules(self, cells: Mapping[str, Cells], order: CompiledPlan) -> dict[str, float]:
        """Predicted peak of each module's fullest rank in this order of the plan. Where modules share ranks, a rank
        holds both, and counts for both."""
        held = self.held_bytes(self.resident_bytes + self.peak_bytes(cells, order))
        return {grid.module: float(held[self._workers(grid.module)].max()) for grid in self._plan.grids}

    def fullest(self, of_stages: Sequence[tuple[np.ndarray, np.ndarray]], order: CompiledPlan) -> float:
        """Bytes of the fullest device, whose microbatches need so much (`of_stages`), in this order of the plan."""
        return float(self.held_bytes(self.resident_bytes + self._peak_bytes(of_stages, order)).max())

    def peak_bytes(self, cells: Mapping[str, Cells], order: CompiledPlan) -> np.ndarray:
        """Of microbatches alone, the most that each worker's ranks hold in this order of the plan, [num_workers]."""
        return self._peak_bytes(self.of_stages(cells), order)

    @cached_property
    def resident_bytes(self) -> np.ndarray:
        """Parameters, gradients and optimiser state on each worker's ranks, [num_workers]."""
        resident = np.zeros(self._compiled.num_workers)
        for stage in self._stage_costs.stages:
            workers = slice(stage.first_worker, stage.first_worker + stage.dp * stage.span)
            resident[workers] += self._stage_costs.resident_bytes(stage)
        return resident

    def of_stages(self, cells: Mapping[str, Cells]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each stage what a microbatch with such loads keeps until its backward, and what comes on top while it is
        computed; arrays shaped as the cells'.

        What came over an edge, or went, is held as well (`EdgeBytes.held`).
        """
        of_stages = []
        for grid in self._plan.grids:
            goes_back = self._stage_costs.has_backward(grid.module)
            of_kind = {}
            memories = self._stage_costs.memories(grid.module, cells[grid.module].loads)
            for memory, token_bytes in zip(memories, self._edge_bytes.held[grid.module].tolist(), strict=True):
                key = id(memory), token_bytes
                if key not in of_kind:
                    at_edges = cells[grid.module].edge_tokens * token_bytes
                    kept = at_edges + (memory.activation_bytes if goes_back else 0.0)
                    of_kind[key] = kept, memory.transient_bytes
                of_stages.append(of_kind[key])
        return of_stages

    def max_bucket_tokens(
        self, items_per_token: Mapping[str, float] | None = None, target_share: float = _TARGET_SHARE
    ) -> int:
        """LLM tokens that all buckets may hold so that the fullest LLM rank stays within the device's memory.

        `items_per_token` are each encoder's items that come with a token, where encoders share the LLM's ranks;
        `target_share` of the tokens are learned. These are means: a bucket with more of either may take more than is
        counted here.

        Raises:
            UserError: when the parameters alone exceed it.
        """
        own = self._workers("llm")
        room = self.require_room()
        nothing, much = (
            self.peak_bytes(self._alike(tokens, items_per_token or {}, target_share), self._compiled)[own]
            for tokens in (0.0, 1000.0)
        )
        room = room - self.resident_bytes[own] - nothing
        return int((room / np.maximum((much - nothing) / 1000, 1e-9)).min())

    def require_room(self) -> float:
        """Bytes of tensors that a device has room for.

        Raises:
            UserError: a module's parameters, gradients and optimiser state alone take as much.
        """
        room = self.tensor_limit_bytes
        for grid in self._plan.grids:
            resident = self.resident_bytes[self._workers(grid.module)].max()
            if room <= resident:
                raise UserError(
                    f"{self._plan}: the parameters, gradients and optimiser state of {grid.module} take "
                    f"{resident / 2**30:.3g} GiB a device and what every process holds "
                    f"{self._costs.overhead_bytes / 2**30:.3g} GiB, `cluster.memory_gib` is "
                    f"{self._cluster.memory_gib}; use more pipeline stages or devices with more memory"
                )
        return room

    def _alike(self, tokens: float, items_per_token: Mapping[str, float], target_share: float) -> dict[str, Cells]:
        """Cells of buckets that all hold so many tokens."""
        has_bridges = PLACEMENTS[self._plan.placement].has_bridges
        cells = {}
        for grid in self._plan.grids:
            nothing = np.zeros((grid.dp, self._plan.num_microbatches))
            full = nothing + tokens * self._plan.grid("llm").dp / grid.dp
            if grid.module == "llm":
                loads = Loads(nothing, full, full**2 / _SAMPLES_A_BUCKET, full * target_share)
                cells[grid.module] = Cells(loads, full)
                continue
            loads = Loads(full * items_per_token.get(grid.module, 0.0), nothing, nothing, nothing)
            # As if all of the text were features, where these are sent at all.
            cells[grid.module] = Cells(loads, full if has_bridges else nothing)
        return cells

    def _peak_bytes(self, of_stages: Sequence[tuple[np.ndarray, np.ndarray]], order: CompiledPlan) -> np.ndarray:
        """What each worker's ranks hold of microbatches at most, [num_workers]."""
        kept, transient = zip(*of_stages, strict=True)
        return peak_bytes(order, np.concatenate(kept), np.concatenate(transient), self._stage_costs.put_off)

    def _workers(self, module: str) -> slice:
        """The workers that carry a module: they lie side by side, those of its first stage first."""
        own = [stage for stage in self._stage_costs.stages if stage.module == module]
        return slice(own[0].first_worker, max(stage.first_worker + stage.dp * stage.span for stage in own))
