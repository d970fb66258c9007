"""Memory on a plan's ranks: parameters, gradients and optimiser state, the microbatches in flight, gradients that are
sent, and on GPUs slots for messages and communicators.

A worker is a group of ranks that act together (`step.nodes`); all of its ranks hold equally many bytes.
`memory_limit` decides which batches fit.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dflop.base import UserError
from dflop.config import ClusterConfig
from dflop.costs import Loads
from dflop.plan import PLACEMENTS
from dflop.schedule.assignment import Cells
from dflop.schedule.edge_bytes import EdgeBytes, sent_bytes_of, slot_bytes_of
from dflop.schedule.stage_costs import StageCosts
from dflop.step import CompiledPlan, communicator_bytes, peak_bytes
from dflop.step.simulation_kernel import BRIDGE_IN

__all__ = ["MicrobatchBytes", "PlanMemory"]

# Assumptions about a bucket: the share of its tokens that are targets (a default), and the number of its samples.
_TARGET_SHARE = 0.25
_SAMPLES_A_BUCKET = 4


class MicrobatchBytes(NamedTuple):
    """What a microbatch takes on a stage: bytes kept until its backward, bytes that come on top while it is computed,
    bytes of the gradient that it sends, and tokens at the stage's edges (`Cells.edge_tokens`). Arrays have the shape of
    the cells'."""

    kept: np.ndarray
    passing: np.ndarray
    sent: np.ndarray
    edge_tokens: np.ndarray


class PlanMemory:
    """Predicted bytes on the devices of one plan."""

    def __init__(
        self,
        stage_costs: StageCosts,
        compiled: CompiledPlan,
        cluster: ClusterConfig,
        edge_bytes: EdgeBytes,
        *,
        is_tied: bool,
    ) -> None:
        """Where the LLM's head is tied to its embedding (`is_tied`), the ends of a pipeline have a communicator."""
        self._stage_costs, self._compiled, self._cluster = stage_costs, compiled, cluster
        self._is_tied = is_tied
        self._plan, self._costs, self._edge_bytes = stage_costs.plan, stage_costs.costs, edge_bytes

    @property
    def limit_bytes(self) -> float:
        """Bytes of memory that a device has."""
        return self._cluster.memory_gib * 2**30

    @property
    def tensor_limit_bytes(self) -> float:
        """The most bytes of tensors with which a process holds no more than the limit."""
        return self._costs.most_tensor_bytes(self.limit_bytes - self.communicator_bytes)

    def held_bytes(self, tensor_bytes: np.ndarray) -> np.ndarray:
        """Bytes that processes with these bytes of tensors hold in all."""
        return self._costs.held_bytes(tensor_bytes) + self.communicator_bytes

    @cached_property
    def communicator_bytes(self) -> float:
        """Bytes of a rank's communicators, which GPUs have."""
        if not self._has_gpus:
            return 0.0
        return communicator_bytes(self._plan, self._costs.communicator_bytes, is_tied=self._is_tied)

    @property
    def _has_gpus(self) -> bool:
        return self._cluster.device == "cuda"

    def of_modules(self, cells: Mapping[str, Cells], order: CompiledPlan) -> dict[str, float]:
        """Predicted peak bytes of each module's fullest rank in this order of the plan. Where modules share ranks, a
        rank holds all of them, and its bytes count for each."""
        return {module: float(held.max()) for module, held in self.along_pipeline(cells, order).items()}

    def along_pipeline(self, cells: Mapping[str, Cells], order: CompiledPlan) -> dict[str, np.ndarray]:
        """By module, the predicted peak bytes of the fullest rank in each place of its pipeline, [pp]."""
        held = self.held_bytes(self.resident_bytes + self.peak_bytes(cells, order))
        of_ranks = {grid: held[self._workers(grid.module)].reshape(grid.pp, -1) for grid in self._plan.grids}
        return {grid.module: of_places.max(axis=1) for grid, of_places in of_ranks.items()}

    def fullest(self, of_stages: Sequence[MicrobatchBytes], order: CompiledPlan) -> float:
        """Bytes of the fullest device in this order of the plan, given the microbatches' bytes (see `of_stages`)."""
        return float(self.held_bytes(self.resident_bytes + self._peak_bytes(of_stages, order)).max())

    def peak_bytes(self, cells: Mapping[str, Cells], order: CompiledPlan) -> np.ndarray:
        """Peak bytes of microbatches and of messages under way on each worker's ranks in this order of the plan,
        [num_workers]."""
        return self._peak_bytes(self.of_stages(cells), order)

    @cached_property
    def resident_bytes(self) -> np.ndarray:
        """Bytes of parameters, gradients and optimiser state on each worker's ranks, [num_workers]."""
        resident = np.zeros(self._compiled.num_workers)
        for stage in self._stage_costs.stages:
            workers = slice(stage.first_worker, stage.first_worker + stage.dp * stage.span)
            resident[workers] += self._stage_costs.resident_bytes(stage)
        return resident

    def of_stages(self, cells: Mapping[str, Cells]) -> list[MicrobatchBytes]:
        """The bytes of microbatches on each stage.

        Tensors that a stage receives and sends are kept, too (`EdgeBytes.held`).
        """
        of_stages = []
        for grid in self._plan.grids:
            of_kind = {}
            own = cells[grid.module]
            memories = self._stage_costs.memories(grid.module, own.loads)
            for memory, token_bytes in zip(memories, self._edge_bytes.held[grid.module].tolist(), strict=True):
                takes_features = self._compiled.stages[len(of_stages), BRIDGE_IN] > 0
                sent_bytes = float(self.sent_bytes[len(of_stages)])
                key = id(memory), token_bytes, sent_bytes, takes_features
                if key not in of_kind:
                    kept = own.edge_tokens * token_bytes + memory.activation_bytes
                    sent = (own.features if takes_features else own.edge_tokens) * sent_bytes
                    of_kind[key] = MicrobatchBytes(kept, memory.transient_bytes, sent, own.edge_tokens)
                of_stages.append(of_kind[key])
        return of_stages

    def bytes_of_rows(self, alone: Mapping[str, Cells]) -> np.ndarray:
        """Bytes that each sample keeps on the fullest rank of its LLM replica, [num_samples], given all samples'
        loads by themselves."""
        of_modules: dict[str, np.ndarray] = {}
        for stage, sizes in zip(self._stage_costs.stages, self.of_stages(alone), strict=True):
            of_modules[stage.module] = np.maximum(of_modules.get(stage.module, 0.0), sizes.kept)
        has_bridges = PLACEMENTS[self._plan.placement].has_bridges
        return sum(kept for module, kept in of_modules.items() if module == "llm" or not has_bridges)

    def max_bucket_tokens(
        self, items_per_token: Mapping[str, float] | None = None, target_share: float = _TARGET_SHARE
    ) -> int:
        """LLM tokens that every bucket may hold, all at once, so that the fullest LLM rank stays within its memory.

        `items_per_token` are each encoder's items for each LLM token, where encoders share the LLM's ranks;
        `target_share` is the share of tokens that are targets. Both are means: a bucket with more items or targets may
        need more memory than is counted here.

        Raises:
            UserError: when a module's parameters, gradients and optimiser state alone exceed the memory.
        """
        workers = self._workers("llm")
        room = self.require_room()
        nothing, much = (
            self.peak_bytes(self._alike(tokens, items_per_token or {}, target_share), self._compiled)[workers]
            for tokens in (0.0, 1000.0)
        )
        room = room - self.resident_bytes[workers] - nothing
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
        """The cells of buckets that all hold `tokens` LLM tokens."""
        has_bridges = PLACEMENTS[self._plan.placement].has_bridges
        cells = {}
        for grid in self._plan.grids:
            nothing = np.zeros((grid.dp, self._plan.num_microbatches))
            full = nothing + tokens * self._plan.grid("llm").dp / grid.dp
            if grid.module == "llm":
                loads = Loads(nothing, full, full**2 / _SAMPLES_A_BUCKET, full * target_share)
                cells[grid.module] = Cells(loads, full, full)
                continue
            loads = Loads(full * items_per_token.get(grid.module, 0.0), nothing, nothing, nothing)
            # Where features are sent, they are counted as if every token were one.
            cells[grid.module] = Cells(loads, full if has_bridges else nothing, nothing)
        return cells

    @cached_property
    def sent_bytes(self) -> np.ndarray:
        """Bytes of the gradient that a stage sends, for each token (`sent_bytes_of`), [num_stages]."""
        return sent_bytes_of(self._plan, self._compiled, self._edge_bytes)

    def slot_bytes(self, order: CompiledPlan) -> np.ndarray:
        """Bytes of slots for messages, for each token of the largest microbatch, [num_stages]."""
        if not self._has_gpus:
            return np.zeros(len(order.stages))
        return slot_bytes_of(self._plan, order, self._edge_bytes)

    def _peak_bytes(self, of_stages: Sequence[MicrobatchBytes], order: CompiledPlan) -> np.ndarray:
        """Peak bytes of microbatches on each worker's ranks, with their messages, [num_workers]."""
        kept, passing, sent, edge_tokens = zip(*of_stages, strict=True)
        held = peak_bytes(order, *map(np.concatenate, (kept, passing, sent)))
        for stage, tokens, size in zip(self._stage_costs.stages, edge_tokens, self.slot_bytes(order), strict=True):
            if size:
                workers = slice(stage.first_worker, stage.first_worker + stage.dp * stage.span)
                held[workers] += np.repeat(tokens.max(axis=1) * size, stage.span)
        return held

    def _workers(self, module: str) -> slice:
        """The workers that carry a module: they have consecutive indices, those of its first stage first."""
        of_module = [stage for stage in self._stage_costs.stages if stage.module == module]
        return slice(of_module[0].first_worker, max(stage.first_worker + stage.dp * stage.span for stage in of_module))
