"""Pricing an assignment: from who computes which samples to the times of every stage, by the cost model.

This is where a plan, a model's costs and a batch's shapes meet. Planning and scheduling both ask here.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numba import njit

from dflop.config import ClusterConfig
from dflop.costs import CostModel, Link, Loads, StageMemory
from dflop.data import SampleShapes
from dflop.errors import UserError
from dflop.models import ModelSpec
from dflop.pipeline import (
    Bridges,
    Node,
    Plan,
    Stage,
    StageTimes,
    Timeline,
    compile_plan,
    nodes_of,
    peak_bytes,
    simulate,
    simulate_step_s,
    stages_of,
)
from dflop.scheduling.problem import BatchProblem

__all__ = ["Assignment", "Pricer"]

_BYTES_PER_VALUE = {"fp32": 4, "bf16": 2, "fp64": 8}
# Of a backward pass, where the costs do not know better: the two products of a matrix are equally large.
_WEIGHT_SHARE = 0.5
# Of a bucket's tokens, how many are learned, where only their number is asked for.
_TARGET_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where each sample of a batch goes; every array is [num_samples].

    `encoder_rank` is the dp rank of the encoder that computes the sample's media.
    """

    llm_dp_rank: np.ndarray
    microbatch: np.ndarray
    encoder_rank: np.ndarray


class Pricer:
    """Stage times, step times and memory of one plan.

    The cost model is asked once for each kind of stage of a module, for all its replicas and microbatches together.
    """

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
        assert len(plan.grids) == 2, "samples know the items of one encoder"
        self.plan, self.costs, self.spec, self.cluster, self.frozen = plan, costs, spec, cluster, frozenset(frozen)
        self.stages = stages_of(plan)
        self._compiled = compile_plan(plan, self.frozen)
        self._bytes_per_value = _BYTES_PER_VALUE[precision]
        self._layers = {
            grid.module: [len(part) for part in plan.layers_of(grid.module, spec.module(grid.module).num_layers)]
            for grid in plan.grids
        }

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """What the rows of stage times stand for."""
        return nodes_of(self.plan)

    @property
    def encoder(self) -> str:
        return self.plan.grids[0].module

    def problem(self, shapes: SampleShapes) -> BatchProblem:
        """The batch as a balancing problem: what each sample adds to its bucket, on each module's slowest stage.

        All buckets of a microbatch share the encoder's replicas, so an encoder's load counts by the ratio of
        the LLM's replicas to its own. A monolithic encoder's counts together with the LLM's first stage.
        """
        encoder, llm = self.plan.grids
        loads = _loads(shapes)
        encoding_s, llm_s = (self._stage_loads_s(module, loads) for module in (self.encoder, "llm"))
        if self.plan.placement == "monolithic":
            first_s = encoding_s[0] + llm_s[0]
        else:
            first_s = encoding_s.max(axis=0) * (llm.dp / encoder.dp)
        shares_ranks = self.plan.placement != "disjoint"
        items_per_token = float(shapes.num_items.sum() / max(1, shapes.llm_tokens.sum())) if shares_ranks else 0.0
        return BatchProblem(
            loads_s=np.column_stack([first_s, llm_s.max(axis=0)]),
            llm_tokens=shapes.llm_tokens,
            num_dp_ranks=llm.dp,
            num_microbatches=self.plan.num_microbatches,
            max_bucket_tokens=self.max_bucket_tokens(items_per_token),
        )

    def assign(self, shapes: SampleShapes, llm_dp_rank: np.ndarray, microbatch: np.ndarray) -> Assignment:
        """Complete an assignment: give media to the encoder's replicas, largest first to the least loaded.

        Disjoint encoders balance each microbatch, colocated ones, which do all forwards before anything else, what
        they have been given so far; monolithic ones take what their LLM replica does.
        """
        num_encoders = self.plan.grids[0].dp
        if self.plan.placement == "monolithic":
            return Assignment(llm_dp_rank=llm_dp_rank, microbatch=microbatch, encoder_rank=llm_dp_rank)
        order = np.lexsort((np.arange(len(shapes)), -shapes.num_items, microbatch))
        starts_anew = self.plan.placement == "disjoint"
        encoder_rank = _deal(order, microbatch, shapes.num_items.astype(np.int64), num_encoders, starts_anew)
        return Assignment(llm_dp_rank=llm_dp_rank, microbatch=microbatch, encoder_rank=encoder_rank)

    def stage_times(self, shapes: SampleShapes, assignment: Assignment) -> StageTimes:
        """Predicted seconds of every computation, transfer and gradient sync of the step.

        The weights' part of a backward is taken to be half of it: the gradients of a matrix's input and of its weights
        are products of the same size. Attention, which has no weights, is thereby shared out too.
        """
        plan = self.plan
        shape = (self._compiled.num_nodes, plan.num_microbatches)
        forward_s, backward_s, chain_s, sync_s = np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape[0])
        of_module = self._of_modules(shapes, assignment)
        priced: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        for stage in self.stages:
            (loads, tokens), own = of_module[stage.module], slice(stage.first_node, stage.first_node + stage.dp)
            part = self._part(stage.module, stage.pp_stage)
            kind = (stage.module, *part.values())
            if kind not in priced:
                priced[kind] = self.costs.stage_time(
                    stage.module, loads=loads, checkpointing=plan.checkpointing, **part
                )
            forward_s[own] = priced[kind][0]
            if self._has_backward(stage.module):
                backward_s[own] = priced[kind][1]
            chain_s[own] = self._chain_s(stage, tokens)
            sync_s[own] = self._sync_s(stage)
        weight_s = None
        if plan.schedule == "zb_h1":
            weight_s = _WEIGHT_SHARE * backward_s
            for stage in self.stages:
                if stage.module in self.frozen:
                    weight_s[stage.first_node : stage.first_node + stage.dp] = 0.0
        return StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=weight_s,
            chain_s=chain_s,
            bridges=self._bridges(shapes, assignment),
            sync_s=sync_s,
        )

    def step_s(self, shapes: SampleShapes, assignment: Assignment) -> float:
        return simulate_step_s(self._compiled, self.stage_times(shapes, assignment))

    def timeline(self, times: StageTimes) -> Timeline:
        return simulate(self._compiled, times)

    def lower_bound_s(self, shapes: SampleShapes) -> float:
        """No schedule of this batch is faster: each stage's work over its replicas, and its largest sample.

        Where modules share ranks, so does all of the work over all ranks, and what the first stage does of both.
        """
        loads = _loads(shapes)
        works_s = {grid.module: self._stage_loads_s(grid.module, loads, least=True) for grid in self.plan.grids}
        bounds = []
        for grid in self.plan.grids:
            bounds += [works_s[grid.module].sum(axis=1).max() / grid.dp, works_s[grid.module].max()]
        encoder, llm = self.plan.grids
        if self.plan.placement == "colocated":
            rank_s = sum(grid.tp * works_s[grid.module].sum() for grid in self.plan.grids)
            bounds.append(rank_s / self.plan.world_size)
        elif self.plan.placement == "monolithic":
            both_s = works_s[encoder.module][0] + works_s["llm"][0]
            bounds += [both_s.sum() / llm.dp, both_s.max()]
        return float(max(bounds))

    def memory_bytes(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, float]:
        """Predicted peak of each module's fullest rank: what is resident, and the microbatches in flight.

        Where modules share ranks, a rank holds both, and counts for both.
        """
        tensors, carries = self._tensor_bytes(self._of_modules(shapes, assignment))
        held = self.costs.overhead_bytes + tensors * (1 + self.costs.allocator_share)
        return {module: float(held[own].max()) for module, own in carries.items()}

    def max_bucket_tokens(self, items_per_token: float = 0.0) -> int:
        """LLM tokens that a bucket may hold so that the fullest LLM rank stays within the device's memory.

        `items_per_token` is what comes with them to encoders on the same ranks. It is a mean: a bucket with more
        items may hold more than is counted here.

        Raises:
            UserError: when the parameters alone exceed it.
        """
        plan, encoder = self.plan, self.plan.grids[0]
        budget = self.cluster.memory_gib * 2**30
        room = (budget - self.costs.overhead_bytes) / (1 + self.costs.allocator_share)
        at = []
        for tokens in (0.0, 1000.0):
            items = tokens * items_per_token * plan.grid("llm").dp / encoder.dp
            text = np.full((plan.grid("llm").dp, plan.num_microbatches), tokens)
            media = np.full((encoder.dp, plan.num_microbatches), items)
            nothing = np.zeros_like(media)
            of_module = {
                encoder.module: (Loads(media, nothing, nothing, nothing), nothing),
                "llm": (Loads(np.zeros_like(text), text, text**2 / 4, text * _TARGET_SHARE), text),
            }
            tensors, carries = self._tensor_bytes(of_module)
            at.append(tensors[carries["llm"]])
        resident = self._resident_of_workers()[carries["llm"]]
        if room <= resident.max():
            raise UserError(
                f"{self.plan}: the LLM's parameters, gradients and optimiser state take {resident.max() / 2**30:.3g} "
                f"GiB a device and what every process holds {self.costs.overhead_bytes / 2**30:.3g} GiB, "
                f"`cluster.memory_gib` is {self.cluster.memory_gib}; use more pipeline stages or devices with more "
                "memory"
            )
        per_token = np.maximum((at[1] - at[0]) / 1000, 1e-9)
        return int(((room - at[0]) / per_token).min())

    def _tensor_bytes(self, of_module: dict[str, tuple[Loads, np.ndarray]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Bytes of tensors on each worker's ranks [num_workers], and the workers that carry each module.

        Given are each module's loads and the tokens that cross its stages' edges, [dp, num_microbatches] each.
        """
        kept = np.zeros((self._compiled.num_nodes, self.plan.num_microbatches))
        transient = np.zeros_like(kept)
        carries: dict[str, list[np.ndarray]] = {}
        for stage in self.stages:
            loads, tokens = of_module[stage.module]
            memory = self._stage_memory(stage, loads)
            own = slice(stage.first_node, stage.first_node + stage.dp)
            if self._has_backward(stage.module):
                kept[own] = memory.activation_bytes
            kept[own] += 2.0 * self._edge_bytes(tokens)  # once forward and once backward
            transient[own] = memory.transient_bytes
            first = stage.first_worker
            carries.setdefault(stage.module, []).append(np.arange(first, first + stage.dp * stage.span))
        tensors = self._resident_of_workers() + peak_bytes(self._compiled, kept, transient)
        return tensors, {module: np.concatenate(workers) for module, workers in carries.items()}

    def _resident_of_workers(self) -> np.ndarray:
        """Parameters, gradients and optimiser state on each worker's ranks; a frozen module has parameters alone."""
        resident = np.zeros(self._compiled.num_workers)
        one = Loads(*np.zeros((4, 1)))
        for stage in self.stages:
            size = self._stage_memory(stage, one).resident_bytes
            first = stage.first_worker
            resident[first : first + stage.dp * stage.span] += size / 4 if stage.module in self.frozen else size
        return resident

    def _stage_memory(self, stage: Stage, loads: Loads) -> StageMemory:
        return self.costs.stage_memory(
            stage.module,
            loads=loads,
            checkpointing=self.plan.checkpointing,
            **self._part(stage.module, stage.pp_stage),
        )

    def _part(self, module: str, stage: int) -> dict[str, Any]:
        """A stage as the cost model wants to know it."""
        layers = self._layers[module]
        return {
            "tp": self.plan.grid(module).tp,
            "num_layers": layers[stage],
            "is_first": stage == 0,
            "is_last": stage == len(layers) - 1,
        }

    def _edge_bytes(self, tokens: np.ndarray) -> np.ndarray:
        return tokens * self.spec.module("llm").hidden_size * self._bytes_per_value

    def _stage_loads_s(self, module: str, loads: Loads, *, least: bool = False) -> np.ndarray:
        """Seconds that each sample adds to each pipeline stage, [pp, num_samples]; `least`: whatever the microbatch."""
        own, priced = _only(module, loads), {}
        for stage in range(len(self._layers[module])):
            part = self._part(module, stage)
            kind = tuple(part.values())
            if kind not in priced:
                priced[kind] = self.costs.additive_loads_s(
                    module,
                    loads=own,
                    checkpointing=self.plan.checkpointing,
                    has_backward=self._has_backward(module),
                    least=least,
                    **part,
                )
        kinds = [tuple(self._part(module, stage).values()) for stage in range(len(self._layers[module]))]
        per_stage = np.array([priced[kind] for kind in kinds])
        return per_stage.reshape(-1, self.plan.grid(module).pp, per_stage.shape[1]).sum(axis=0)

    def _has_backward(self, module: str) -> bool:
        """A frozen encoder has none; a frozen LLM still passes gradients on."""
        return module == "llm" or module not in self.frozen

    def _module_loads(self, shapes: SampleShapes, assignment: Assignment, module: str) -> Loads:
        """What a module's replicas compute, arrays [dp, num_microbatches]."""
        replica = assignment.llm_dp_rank if module == "llm" else assignment.encoder_rank
        loads = _only(module, _loads(shapes))
        return Loads(*(self._sum(load, replica, assignment.microbatch, module) for load in loads))

    def _sum(self, values: np.ndarray, replica: np.ndarray, microbatch: np.ndarray, module: str) -> np.ndarray:
        """Sums over the samples of each (replica, microbatch), [dp, num_microbatches]."""
        num_replicas, num_microbatches = self.plan.grid(module).dp, self.plan.num_microbatches
        cell = replica * num_microbatches + microbatch
        return np.bincount(cell, weights=values, minlength=num_replicas * num_microbatches).reshape(num_replicas, -1)

    def _chain_s(self, stage: Stage, tokens: np.ndarray) -> np.ndarray | float:
        """[dp, num_microbatches]: latency and bytes over bandwidth of tokens that go to the module's next stage.

        What travels inside an encoder is priced as if it were its features: no shape says how much it is.
        """
        behind = next(
            (other for other in self.stages if (other.module, other.pp_stage) == (stage.module, stage.pp_stage + 1)),
            None,
        )
        if behind is None or behind.first_worker == stage.first_worker:
            return 0.0
        ends = [self._first_ranks(other, np.arange(stage.dp)) for other in (stage, behind)]
        return self._p2p_s(*(ranks[:, None] for ranks in ends), self._edge_bytes(tokens))

    def _bridges(self, shapes: SampleShapes, assignment: Assignment) -> Bridges:
        """A message for every (encoder replica, LLM replica, microbatch) that visual tokens travel between."""
        if self.plan.placement == "monolithic":
            return Bridges.none()
        plan = self.plan
        encoder = next(stage for stage in reversed(self.stages) if stage.module != "llm")
        llm = next(stage for stage in self.stages if stage.module == "llm")
        sent = np.flatnonzero(shapes.kept_vision_tokens)
        shape = (encoder.dp, llm.dp, plan.num_microbatches)
        places = (assignment.encoder_rank[sent], assignment.llm_dp_rank[sent], assignment.microbatch[sent])
        cells, message = np.unique(np.ravel_multi_index(places, shape), return_inverse=True)
        tokens = np.bincount(message, weights=shapes.kept_vision_tokens[sent], minlength=len(cells))
        source, target, microbatch = np.unravel_index(cells, shape)
        seconds = self._p2p_s(
            self._first_ranks(encoder, source), self._first_ranks(llm, target), self._edge_bytes(tokens)
        )
        if plan.placement == "colocated":
            # On the same ranks: nothing moves.
            here = [stage.first_worker + replica * stage.span for stage, replica in ((encoder, source), (llm, target))]
            seconds[(here[0] < here[1] + llm.span) & (here[1] < here[0] + encoder.span)] = 0.0
        return Bridges(
            source=encoder.first_node + source,
            target=llm.first_node + target,
            microbatch=microbatch,
            seconds=seconds,
        )

    def _of_modules(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, tuple[Loads, np.ndarray]]:
        """Each module's loads, and the tokens that cross its stages' edges."""
        return {
            grid.module: (
                self._module_loads(shapes, assignment, grid.module),
                self._edge_tokens(shapes, assignment, grid.module),
            )
            for grid in self.plan.grids
        }

    def _edge_tokens(self, shapes: SampleShapes, assignment: Assignment, module: str) -> np.ndarray:
        """Tokens that each replica of a module exchanges with its neighbours, [dp, num_microbatches]."""
        replica = assignment.llm_dp_rank if module == "llm" else assignment.encoder_rank
        is_llm_chain = module == "llm" and self.plan.num_stages("llm") > 1
        tokens = shapes.llm_tokens if is_llm_chain else shapes.kept_vision_tokens
        if self.plan.placement == "monolithic" and not is_llm_chain:
            tokens = np.zeros_like(tokens)
        return self._sum(tokens, replica, assignment.microbatch, module)

    def extrapolated_share(self, shapes: SampleShapes, assignment: Assignment) -> float:
        """The share of the microbatches whose loads lie outside of what was measured."""
        flags = []
        for grid in self.plan.grids:
            loads = self._module_loads(shapes, assignment, grid.module)
            outside = self.costs.is_extrapolated(grid.module, grid.tp, loads, checkpointing=self.plan.checkpointing)
            flags.append(outside.ravel())
        return float(np.concatenate(flags).mean())

    def _sync_s(self, stage: Stage) -> float:
        """All-reduce of the stage's fp32 gradients over its replicas."""
        if stage.dp == 1 or stage.module in self.frozen:
            return 0.0
        size = self.costs.stage_parameter_bytes(stage.module, **self._part(stage.module, stage.pp_stage))
        first, last = self._first_ranks(stage, np.array([0, stage.dp - 1]))
        is_intra = first // self.cluster.devices_per_node == last // self.cluster.devices_per_node
        return self._link("all_reduce", is_intra, stage.dp).seconds(size)

    def _p2p_s(self, first: np.ndarray, second: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        is_intra = first // self.cluster.devices_per_node == second // self.cluster.devices_per_node
        intra, inter = (self._link("p2p", where).seconds(num_bytes) for where in (True, False))
        return np.where(is_intra, intra, inter)

    def _link(self, kind: str, is_intra: bool, num_ranks: int = 2) -> Link:
        """As measured; where it was not, at the configured bandwidth, in a ring and without latency."""
        measured = self.costs.links.find(kind, "intra" if is_intra else "inter", num_ranks)
        if measured is not None:
            return measured
        bytes_per_s = (self.cluster.intra_node_gbps if is_intra else self.cluster.inter_node_gbps) * 1e9 / 8
        return Link(0.0, bytes_per_s if kind == "p2p" else bytes_per_s * num_ranks / (2 * (num_ranks - 1)))

    def _first_ranks(self, stage: Stage, replica: np.ndarray) -> np.ndarray:
        """The first rank of each of a stage's replicas."""
        grid = self.plan.grid(stage.module)
        return grid.first_rank(stage.pp_stage % grid.pp, replica)


@njit(cache=True)
def _deal(order, microbatch, num_items, num_encoders, starts_anew):
    """Each sample's encoder replica: samples come in `order`, by microbatch; `starts_anew` with each of them."""
    encoder_rank = np.zeros(len(order), dtype=np.int64)
    loads = [(0, replica) for replica in range(num_encoders)]
    current = -1
    for sample in order:
        if starts_anew and microbatch[sample] != current:
            loads = [(0, replica) for replica in range(num_encoders)]
        current = microbatch[sample]
        load, replica = loads[0]
        encoder_rank[sample] = replica
        heapq.heapreplace(loads, (load + num_items[sample], replica))
    return encoder_rank


def _loads(shapes: SampleShapes) -> Loads:
    return Loads(
        num_items=shapes.num_items.astype(float),
        num_tokens=shapes.llm_tokens.astype(float),
        sum_sq_tokens=shapes.llm_tokens.astype(float) ** 2,
        num_targets=shapes.target_tokens.astype(float),
    )


def _only(module: str, loads: Loads) -> Loads:
    """The loads that a module sees: items for encoders, text for the LLM."""
    nothing = np.zeros_like(loads.num_items)
    if module == "llm":
        return loads._replace(num_items=nothing)
    return Loads(loads.num_items, nothing, nothing, nothing)
