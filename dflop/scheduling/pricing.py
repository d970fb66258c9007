"""Pricing an assignment: from who computes which samples to the times of every stage, by the cost model.

This is where a plan, a model's costs and a batch's shapes meet. Planning and scheduling both ask here.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop.config import ClusterConfig
from dflop.costs import CostModel, Link, Loads, StageMemory
from dflop.data import SampleShapes
from dflop.errors import UserError
from dflop.models import ModelSpec
from dflop.pipeline import (
    Plan,
    StageTimes,
    Timeline,
    Worker,
    compile_program,
    make_program,
    simulate,
    simulate_step_s,
    split_layers,
)
from dflop.scheduling.problem import BatchProblem

__all__ = ["Assignment", "Pricer"]

_BYTES_PER_VALUE = {"fp32": 4, "bf16": 2, "fp64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where each sample of a batch goes; every array is [num_samples].

    `encoder_rank` is the dp rank of the encoder that computes the sample's media.
    """

    llm_dp_rank: np.ndarray
    microbatch: np.ndarray
    encoder_rank: np.ndarray


class Pricer:
    """Stage times, step times and memory of one plan."""

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        spec: ModelSpec,
        cluster: ClusterConfig,
        *,
        frozen: Collection[str] = (),
        precision: str = "fp32",
    ) -> None:
        assert len(plan.grids) == 2, "one encoder and the LLM"
        self.plan, self.costs, self.spec, self.cluster, self.frozen = plan, costs, spec, cluster, frozenset(frozen)
        self.program = make_program(plan, self.frozen)
        self._compiled = compile_program(self.program)
        self._bytes_per_value = _BYTES_PER_VALUE[precision]
        self._layers = {
            grid.module: [len(part) for part in split_layers(spec.module(grid.module).num_layers, grid.pp)]
            for grid in plan.grids
        }
        self._edge_links = [
            self._link("p2p", *(self._first_rank(self.program.workers[end]) for end in (edge.source, edge.target)))
            for edge in self.program.edges
        ]

    @property
    def encoder(self) -> str:
        return self.plan.grids[0].module

    def problem(self, shapes: SampleShapes) -> BatchProblem:
        """The batch as a balancing problem: what each sample adds to its bucket, on each module's slowest stage.

        All buckets of a microbatch share the encoder's replicas, so an encoder's load counts by the ratio of
        the LLM's replicas to its own.
        """
        encoder, llm = self.plan.grids
        share = llm.dp / encoder.dp
        loads = _loads(shapes)
        per_module = [self._stage_loads_s(module, loads).max(axis=0) for module in (self.encoder, "llm")]
        per_module[0] *= share
        return BatchProblem(
            loads_s=np.column_stack(per_module),
            llm_tokens=shapes.llm_tokens,
            num_dp_ranks=llm.dp,
            num_microbatches=self.plan.num_microbatches,
            max_bucket_tokens=self.max_bucket_tokens(),
        )

    def assign(self, shapes: SampleShapes, llm_dp_rank: np.ndarray, microbatch: np.ndarray) -> Assignment:
        """Complete an assignment: give each microbatch's media to the encoder's replicas, largest first."""
        num_encoders = self.plan.grids[0].dp
        encoder_rank = np.zeros(len(shapes), dtype=np.int64)
        if num_encoders > 1:
            load = np.zeros((self.plan.num_microbatches, num_encoders))
            for sample in np.argsort(-shapes.num_items, kind="stable"):
                replica = int(np.argmin(load[microbatch[sample]]))
                encoder_rank[sample] = replica
                load[microbatch[sample], replica] += shapes.num_items[sample]
        return Assignment(llm_dp_rank=llm_dp_rank, microbatch=microbatch, encoder_rank=encoder_rank)

    def stage_times(self, shapes: SampleShapes, assignment: Assignment) -> StageTimes:
        """Predicted seconds of every computation, transfer and gradient sync of the step."""
        plan, num_microbatches = self.plan, self.plan.num_microbatches
        llm = plan.grid("llm")
        encoder_loads = self._summed(shapes, assignment.encoder_rank, assignment.microbatch, plan.grids[0].dp)
        llm_loads = self._summed(shapes, assignment.llm_dp_rank, assignment.microbatch, llm.dp)
        forward_s = np.zeros((len(self.program.workers), num_microbatches))
        backward_s = np.zeros_like(forward_s)
        sync_s = np.zeros(len(self.program.workers))
        for index, worker in enumerate(self.program.workers):
            loads = _only(worker.module, llm_loads if worker.module == "llm" else encoder_loads, worker.dp_rank)
            stage = self._stage(worker.module, worker.pp_stage)
            forward_s[index], backward_s[index] = self.costs.stage_time(
                worker.module, loads=loads, checkpointing=plan.checkpointing, **stage
            )
            if not self._has_backward(worker.module):
                backward_s[index] = 0.0
            sync_s[index] = self._sync_s(worker.module, worker.pp_stage)
        return StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            transfer_s=self._transfer_s(shapes, assignment, llm_loads),
            sync_s=sync_s,
        )

    def step_s(self, shapes: SampleShapes, assignment: Assignment) -> float:
        return simulate_step_s(self._compiled, self.stage_times(shapes, assignment))

    def timeline(self, times: StageTimes) -> Timeline:
        return simulate(self._compiled, times)

    def lower_bound_s(self, shapes: SampleShapes) -> float:
        """No schedule of this batch is faster: each stage's work over its replicas, and its largest sample."""
        loads = _loads(shapes)
        bounds = []
        for grid in self.plan.grids:
            work_s = self._stage_loads_s(grid.module, loads, least=True)
            bounds += [work_s.sum(axis=1).max() / grid.dp, work_s.max()]
        return float(max(bounds))

    def memory_bytes(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, float]:
        """Predicted peak of each module's fullest rank: what is resident, and the microbatches in flight."""
        plan = self.plan
        peaks = {}
        for grid in plan.grids:
            replica = assignment.llm_dp_rank if grid.module == "llm" else assignment.encoder_rank
            loads = _only(grid.module, self._summed(shapes, replica, assignment.microbatch, grid.dp), slice(None))
            layers = self._layers[grid.module]
            tokens = self._edge_tokens(shapes, assignment, grid.module)
            stages = [
                self._stage_peak(
                    grid.module, stage, loads, tokens, min(plan.num_microbatches, self._in_flight(grid.module, stage))
                )
                for stage in range(len(layers))
            ]
            peaks[grid.module] = max(stages)
        return peaks

    def max_bucket_tokens(self) -> int:
        """LLM tokens that a bucket may hold so that the fullest LLM stage stays within the device's memory.

        Raises:
            UserError: when the parameters alone exceed it.
        """
        budget = self.cluster.memory_gib * 2**30
        llm = "llm"
        caps = []
        for stage in range(len(self._layers[llm])):
            probe = Loads(*(np.array([0.0, value]) for value in (0, 1000, 1000**2 / 4, 250)))
            memory = self.costs.stage_memory(
                llm, loads=probe, checkpointing=self.plan.checkpointing, **self._stage(llm, stage)
            )
            in_flight = min(self.plan.num_microbatches, self._in_flight(llm, stage))
            resident = self._resident_bytes(llm, memory)
            free = (budget - self.costs.overhead_bytes) / (1 + self.costs.allocator_share) - resident
            if free <= 0:
                raise UserError(
                    f"{self.plan}: the LLM's parameters, gradients and optimiser state take {resident / 2**30:.3g} GiB "
                    f"a device and what every process holds {self.costs.overhead_bytes / 2**30:.3g} GiB, "
                    f"`cluster.memory_gib` is {self.cluster.memory_gib}; use more pipeline stages or devices with more "
                    "memory"
                )
            nothing, much = in_flight * (memory.activation_bytes + self._edge_bytes(probe.num_tokens))
            nothing, much = nothing + memory.transient_bytes[0], much + memory.transient_bytes[1]
            caps.append(int((free - nothing) / max((much - nothing) / 1000, 1e-9)))
        return min(caps)

    def _in_flight(self, module: str, stage: int) -> int:
        depth = self.plan.grid("llm").pp
        return depth - stage if module == "llm" else depth + 1

    def _stage(self, module: str, stage: int) -> dict[str, Any]:
        """A stage as the cost model wants to know it."""
        layers = self._layers[module]
        return {
            "tp": self.plan.grid(module).tp,
            "num_layers": layers[stage],
            "is_first": stage == 0,
            "is_last": stage == len(layers) - 1,
        }

    def _stage_peak(self, module: str, stage: int, loads: Loads, tokens: np.ndarray, in_flight: int) -> float:
        """Bytes of a stage's fullest replica; `tokens` cross the stage's edge with each microbatch."""
        memory = self.costs.stage_memory(
            module, loads=loads, checkpointing=self.plan.checkpointing, **self._stage(module, stage)
        )
        kept = memory.activation_bytes if self._has_backward(module) else np.zeros_like(memory.activation_bytes)
        kept = kept + self._edge_bytes(tokens)
        fullest = np.sort(kept, axis=-1)[..., -in_flight:].sum(axis=-1) + memory.transient_bytes.max(axis=-1)
        tensors = self._resident_bytes(module, memory) + float(fullest.max())
        return self.costs.overhead_bytes + tensors * (1 + self.costs.allocator_share)

    def _edge_bytes(self, tokens: np.ndarray) -> np.ndarray:
        """What came over an edge or waits to leave, once forward and once backward."""
        return 2.0 * tokens * self.spec.module("llm").hidden_size * self._bytes_per_value

    def _resident_bytes(self, module: str, memory: StageMemory) -> float:
        """A frozen module holds its parameters alone: no gradients, no moments."""
        return memory.resident_bytes / 4 if module in self.frozen else memory.resident_bytes

    def _stage_loads_s(self, module: str, loads: Loads, *, least: bool = False) -> np.ndarray:
        """Seconds that each sample adds to each stage, [num_stages, num_samples]; `least`: whatever the microbatch."""
        return np.array(
            [
                self.costs.additive_loads_s(
                    module,
                    loads=_only(module, loads, slice(None)),
                    checkpointing=self.plan.checkpointing,
                    has_backward=self._has_backward(module),
                    least=least,
                    **self._stage(module, stage),
                )
                for stage in range(len(self._layers[module]))
            ]
        )

    def _has_backward(self, module: str) -> bool:
        """A frozen encoder has none; a frozen LLM still passes gradients on."""
        return module == "llm" or module not in self.frozen

    def _summed(self, shapes: SampleShapes, replica: np.ndarray, microbatch: np.ndarray, num_replicas: int) -> Loads:
        """Loads of each (replica, microbatch), arrays [num_replicas, num_microbatches]."""
        num_microbatches = self.plan.num_microbatches
        cell = replica * num_microbatches + microbatch
        return Loads(
            *(
                np.bincount(cell, weights=load, minlength=num_replicas * num_microbatches).reshape(num_replicas, -1)
                for load in _loads(shapes)
            )
        )

    def _transfer_s(self, shapes: SampleShapes, assignment: Assignment, llm_loads: Loads) -> np.ndarray:
        """[num_edges, num_microbatches]: latency and bytes over bandwidth; NaN where a bridge carries nothing."""
        num_microbatches = self.plan.num_microbatches
        bridged = self._bridged_tokens(shapes, assignment)
        bytes_per_token = self.spec.module("llm").hidden_size * self._bytes_per_value
        workers = self.program.workers
        transfer_s = np.zeros((len(self.program.edges), num_microbatches))
        for index, edge in enumerate(self.program.edges):
            source, target = workers[edge.source], workers[edge.target]
            tokens = bridged[source.dp_rank, target.dp_rank] if edge.is_bridge else llm_loads.num_tokens[source.dp_rank]
            transfer_s[index] = self._edge_links[index].seconds(tokens * bytes_per_token)
            if edge.is_bridge:
                transfer_s[index, tokens == 0] = np.nan
        return transfer_s

    def _bridged_tokens(self, shapes: SampleShapes, assignment: Assignment) -> np.ndarray:
        """Visual tokens that each encoder replica sends to each of the LLM's, [encoders, llms, num_microbatches]."""
        plan = self.plan
        shape = (plan.grids[0].dp, plan.grid("llm").dp, plan.num_microbatches)
        cell = np.ravel_multi_index((assignment.encoder_rank, assignment.llm_dp_rank, assignment.microbatch), shape)
        return np.bincount(cell, weights=shapes.kept_vision_tokens, minlength=math.prod(shape)).reshape(shape)

    def _edge_tokens(self, shapes: SampleShapes, assignment: Assignment, module: str) -> np.ndarray:
        """Tokens that each replica of a module exchanges with its neighbours, [replicas, num_microbatches]."""
        bridged = self._bridged_tokens(shapes, assignment)
        if module != "llm":
            return bridged.sum(axis=1)
        if self.plan.grid("llm").pp == 1:
            return bridged.sum(axis=0)
        replica = assignment.llm_dp_rank
        return self._summed(shapes, replica, assignment.microbatch, self.plan.grid("llm").dp).num_tokens

    def extrapolated(self, shapes: SampleShapes, assignment: Assignment) -> np.ndarray:
        """Which workers' microbatches hold loads outside of what was measured, bool [num_workers, num_microbatches]."""
        by_module = self._outside(shapes, assignment)
        return np.array([by_module[worker.module][worker.dp_rank] for worker in self.program.workers])

    def extrapolated_share(self, shapes: SampleShapes, assignment: Assignment) -> float:
        """The share of the microbatches whose loads lie outside of what was measured."""
        return float(np.concatenate([flags.ravel() for flags in self._outside(shapes, assignment).values()]).mean())

    def _outside(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, np.ndarray]:
        """By module, bool [dp, num_microbatches]."""
        flags = {}
        for grid in self.plan.grids:
            replica = assignment.llm_dp_rank if grid.module == "llm" else assignment.encoder_rank
            loads = _only(grid.module, self._summed(shapes, replica, assignment.microbatch, grid.dp), slice(None))
            flags[grid.module] = self.costs.is_extrapolated(
                grid.module, grid.tp, loads, checkpointing=self.plan.checkpointing
            )
        return flags

    def _sync_s(self, module: str, stage: int) -> float:
        """All-reduce of the stage's fp32 gradients over its replicas."""
        grid = self.plan.grid(module)
        if grid.dp == 1 or module in self.frozen:
            return 0.0
        size = self.costs.stage_parameter_bytes(module, **self._stage(module, stage))
        first, last = grid.first_rank(stage, 0), grid.first_rank(stage, grid.dp - 1)
        return self._link("all_reduce", first, last, grid.dp).seconds(size)

    def _link(self, kind: str, first_rank: int, last_rank: int, num_ranks: int = 2) -> Link:
        """As measured; where it was not, at the configured bandwidth, in a ring and without latency."""
        cluster = self.cluster
        is_intra = first_rank // cluster.devices_per_node == last_rank // cluster.devices_per_node
        measured = self.costs.links.find(kind, "intra" if is_intra else "inter", num_ranks)
        if measured is not None:
            return measured
        bytes_per_s = (cluster.intra_node_gbps if is_intra else cluster.inter_node_gbps) * 1e9 / 8
        return Link(0.0, bytes_per_s if kind == "p2p" else bytes_per_s * num_ranks / (2 * (num_ranks - 1)))

    def _first_rank(self, worker: Worker) -> int:
        return self.plan.grid(worker.module).first_rank(worker.pp_stage, worker.dp_rank)


def _loads(shapes: SampleShapes) -> Loads:
    return Loads(
        num_items=shapes.num_items.astype(float),
        num_tokens=shapes.llm_tokens.astype(float),
        sum_sq_tokens=shapes.llm_tokens.astype(float) ** 2,
        num_targets=shapes.target_tokens.astype(float),
    )


def _only(module: str, loads: Loads, index: object) -> Loads:
    """The loads that a module sees: items for encoders, text for the LLM."""
    chosen = Loads(*(load[index] for load in loads))
    nothing = np.zeros_like(chosen.num_items)
    if module == "llm":
        return chosen._replace(num_items=nothing)
    return Loads(chosen.num_items, nothing, nothing, nothing)
